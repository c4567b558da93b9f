"""The transport of leases inside messages: `depart` replaces the sender's handle, `arrive` names the new holder.

The types of a message's fields say where its leases are (actors/messages.py); nothing else does.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import get_args, get_origin

import msgspec
from msgspec import Struct

from baton.actors.lease import Lease, Ledger
from baton.actors.messages import Message


@dataclass(frozen=True, slots=True)
class LeaseField:
    """A field of a message that holds leases: one lease, a list of leases, or a list of Structs that hold leases."""

    name: str
    listed: bool  # the field is a list
    inner: "tuple[LeaseField, ...]" = ()  # for a list of Structs: their fields that hold leases


def lease_fields(kind: type[Struct]) -> tuple[LeaseField, ...]:
    """Return the fields of a message type that hold leases.

    Raises TypeError if a field could hold a lease where `leases_at` would not find it, such as a dict or an optional.
    """
    found = []
    for field in msgspec.structs.fields(kind):
        listed = get_origin(field.type) is list
        held = get_args(field.type)[0] if listed else field.type
        inner = lease_fields(held) if isinstance(held, type) and issubclass(held, Struct) else ()
        if held is Lease or (listed and inner):
            found.append(LeaseField(field.name, listed, inner))
        elif inner or mentions_lease(field.type):
            raise TypeError(f"{kind.__name__}.{field.name}: a lease cannot travel in {field.type}")
    return tuple(found)


def mentions_lease(annotation: object) -> bool:
    """Return whether a type is Lease, or has it as a parameter."""
    return annotation is Lease or any(map(mentions_lease, get_args(annotation)))


LEASE_FIELDS: dict[type, tuple[LeaseField, ...]] = {kind: lease_fields(kind) for kind in get_args(Message)}


def depart(message: Message, sender: str, receiver: str, ledger: Ledger) -> None:
    """Replace each lease in `message` by a new handle, whose slot is in transit.

    All leases are checked first, so a send that is refused moves nothing.
    """
    fields = LEASE_FIELDS[type(message)]
    if not fields:
        return
    for lease in leases_at(message, fields):
        lease.check()
    name = type(message).__name__
    move_all(message, fields, lambda lease: ledger.depart(lease, sender, receiver, name))


def arrive(message: Message, receiver: str, ledger: Ledger) -> None:
    """Record that the receiver holds the leases of `message`."""
    for lease in leases_in(message):
        ledger.arrive(lease, receiver)


def leases_in(message: Message) -> Iterator[Lease]:
    return leases_at(message, LEASE_FIELDS[type(message)])


def leases_at(holder: Struct, fields: tuple[LeaseField, ...]) -> Iterator[Lease]:
    for field in fields:
        value = getattr(holder, field.name)
        for item in value if field.listed else (value,):
            if field.inner:
                yield from leases_at(item, field.inner)
            else:
                yield item


def move_all(holder: Struct, fields: tuple[LeaseField, ...], move: Callable[[Lease], Lease]) -> None:
    """Replace each lease with the result of `move`."""
    for field in fields:
        value = getattr(holder, field.name)
        if field.inner:
            for item in value:
                move_all(item, field.inner, move)
        else:
            setattr(holder, field.name, [move(lease) for lease in value] if field.listed else move(value))
