"""Messages as short lines of a trace."""

from typing import Any

from msgspec import NODEFAULT, Struct
from msgspec.structs import fields

from baton.actors.lease import Lease
from baton.actors.messages import Message
from baton.actors.requests import Request
from baton.actors.tokens import count, cut, unpack

MAX_TOKENS = 6


def line(at: float, sender: str, to: str, message: Message) -> str:
    return f"{at:7.0f}  {sender:>9} → {to:<9}  {show(message)}"


def show(value: Any) -> str:
    match value:
        case str():
            return repr(value) if not value.isidentifier() else value
        case bytes():
            return tokens(value)
        case Lease():
            return f"slot {value._slot}#{value._generation}"
        case Request():
            output = count(value.tokens) - value.prompt_len
            return f"{value.id} {tokens(value.tokens)}" + (f", {output} of them output" if output else "")
        case Struct():
            return f"{type(value).__name__}({', '.join(parts(value))})"
        case list() | tuple():
            return f"[{', '.join(map(show, value))}]"
        case _:
            return str(value)


def parts(message: Struct) -> list[str]:
    """Format the fields of a message that are set and differ from their default."""
    found = []
    for field in fields(message):
        value = getattr(message, field.name)
        if value is None or value is False or value in ([], "", b""):
            continue
        if field.default is not NODEFAULT and value == field.default:
            continue
        found.append(show(value) if field.name in ("request", "state") else f"{field.name}={show(value)}")
    return found


def tokens(packed: bytes) -> str:
    number = count(packed)
    some = " ".join(map(str, unpack(cut(packed, 0, MAX_TOKENS))))
    return f"⟨{some}⟩" if number <= MAX_TOKENS else f"⟨{some} … {number}⟩"
