"""What a trace file holds: one event a line. Times are seconds of one monotonic clock."""

from collections.abc import Iterator
from typing import Literal, TypeAlias

from msgspec import Struct

from baton.actors.lease import Move
from baton.actors.messages import (
    Admit,
    Admitted,
    Delta,
    Ended,
    Extend,
    Extended,
    Free,
    Masked,
    Requeue,
    Settled,
    Step,
    Stepped,
    Submit,
)
from baton.actors.runtime.tracing import Envelope
from baton.actors.tokens import count


class HeaderEvent(Struct, frozen=True, tag="header"):
    """The first line: what the clock showed at a moment of Unix time."""

    version: int
    unix_time: float
    clock: float


class UnitEvent(Struct, frozen=True, tag="unit"):
    """The four actors were made, with a ledger of which all slots are free."""

    at: float
    slots: int


class MessageEvent(Struct, frozen=True, tag="message", omit_defaults=True):
    """grants, requests: those that it names; of a batch, those of which it says something in particular."""

    sequence: int
    name: str
    sender: str
    to: str
    sent: float
    delivered: float
    handled: float
    trace: str = ""
    grants: tuple[int, ...] = ()
    requests: tuple[str, ...] = ()
    step: int | None = None


class ActEvent(Struct, frozen=True, tag="act"):
    actor: str
    began: float
    ended: float


class MoveEvent(Struct, frozen=True, tag="move"):
    """The ledger's Move, with its time."""

    at: float
    slot: int
    generation: int
    place: str
    holder: str
    how: str


class StepEvent(Struct, frozen=True, tag="step"):
    """From the device's thread: when it ran a step, and over how much."""

    step: int
    began: float
    ended: float
    rows: int
    tokens: int


class RequestEvent(Struct, frozen=True, tag="request", omit_defaults=True):
    """tokens: of the prompt when it is queued, else of the answer so far."""

    at: float
    request: str
    what: Literal["queued", "admitted", "first_token", "ended"]
    trace: str = ""
    tokens: int = 0
    reason: str = ""


class HistoryEvent(Struct, frozen=True, tag="history", omit_defaults=True):
    """A request that has ended, without its tokens.

    at: when it was submitted. prompt, answer: how many tokens. ends: of the prompt's messages. blocks: of prompt and
    answer a number for each whole block of `block` tokens; under equal salts, equal numbers say that all is equal up to
    that block's end. salt: a number for it.
    """

    at: float
    request: str
    prompt: int
    answer: int
    salt: int
    block: int
    blocks: tuple[int, ...]
    ends: tuple[int, ...] = ()


class DroppedEvent(Struct, frozen=True, tag="dropped"):
    """So many events are missing hereabouts: they came faster than they could be written."""

    count: int


Event: TypeAlias = (
    HeaderEvent
    | UnitEvent
    | MessageEvent
    | ActEvent
    | MoveEvent
    | StepEvent
    | RequestEvent
    | HistoryEvent
    | DroppedEvent
)


def move_event(move: Move, at: float) -> MoveEvent:
    return MoveEvent(at, move.slot, move.generation, str(move.place), move.holder, move.how)


def message_event(envelope: Envelope, to: str, delivered: float, handled: float) -> MessageEvent:
    """Plain values only: a message that is kept would keep its leases alive."""
    message = envelope.message
    return MessageEvent(
        envelope.sequence,
        type(message).__name__,
        envelope.sender,
        to,
        envelope.sent,
        delivered,
        handled,
        envelope.trace,
        named_grants(envelope),
        named_requests(envelope),
        getattr(message, "step", None),
    )


def named_grants(envelope: Envelope) -> tuple[int, ...]:
    match message := envelope.message:
        case Step():
            return tuple(chunk.grant for chunk in message.chunks)
        case Stepped() | Extend():
            return tuple(message.grants)
        case Extended():
            return tuple(given.grant for given in message.pages)
        case Settled():
            return (*message.finished, *message.failed)
        case Masked():
            return (*(mask.grant for mask in message.masks), *message.finished)
        case Free():
            return () if message.closes_grant is None else (message.closes_grant,)
        case _:
            grant = getattr(message, "grant", None)
            return () if grant is None else (grant,)


def named_requests(envelope: Envelope) -> tuple[str, ...]:
    match message := envelope.message:
        case Submit() | Admit() | Admitted() | Requeue():
            return (message.request.id,)
        case Delta():
            return tuple(output.request for output in message.outputs)
        case _:
            request = getattr(message, "request", None)
            return (request,) if isinstance(request, str) else ()


def request_events(envelope: Envelope, to: str, at: float) -> Iterator[RequestEvent]:
    """What a message says of the life of requests; their ends count as they reach the api."""
    match message := envelope.message:
        case Submit():
            request = message.request
            yield RequestEvent(envelope.sent, request.id, "queued", request.trace, request.prompt_len)
        case Admitted():
            yield RequestEvent(envelope.sent, message.request.id, "admitted", message.request.trace)
        case Delta():
            for output in message.outputs:
                new, so_far = count(output.tokens), output.completion_tokens
                if new and new == so_far:
                    yield RequestEvent(at, output.request, "first_token", tokens=so_far)
                if output.finish_reason is not None:
                    yield RequestEvent(at, output.request, "ended", tokens=so_far, reason=output.finish_reason)
        case Ended() if to == "api":
            yield RequestEvent(at, message.request, "ended", envelope.trace, reason=message.reason)
        case _:
            pass
