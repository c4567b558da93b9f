"""The events of a trace file, one a line. Times are seconds of one monotonic clock."""

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
from baton.actors.runtime.mailboxes import Envelope
from baton.actors.tokens import count


class HeaderEvent(Struct, frozen=True, tag="header"):
    """The first line of a trace file: one moment in Unix time and by the clock, so that times can be converted."""

    version: int
    unix_time: float
    clock: float


class UnitEvent(Struct, frozen=True, tag="unit"):
    """The four actors were created or restarted, and all slots of the ledger are free."""

    at: float
    slots: int


class MessageEvent(Struct, frozen=True, tag="message", omit_defaults=True):
    """A message was delivered and handled."""

    sequence: int  # the message's number, in the order of sending
    name: str  # the type of the message
    sender: str
    to: str
    sent: float
    delivered: float
    handled: float  # when `receive` returned
    trace: str = ""  # the W3C trace id of the message's request, if it has one
    grants: tuple[int, ...] = ()  # grants that the message names; for a Step, those with chunks
    requests: tuple[str, ...] = ()  # requests that the message names
    step: int | None = None  # the step that the message is about


class ActEvent(Struct, frozen=True, tag="act"):
    """An actor's `act` ran."""

    actor: str
    began: float
    ended: float


class MoveEvent(Struct, frozen=True, tag="move"):
    """A slot changed its place: the ledger's Move, with its time."""

    at: float
    slot: int
    generation: int
    place: str
    holder: str
    how: str


class StepEvent(Struct, frozen=True, tag="step"):
    """The device ran a step. Sent from the device's thread."""

    step: int
    began: float
    ended: float
    rows: int
    tokens: int  # prompt tokens and decoded rows


class RequestEvent(Struct, frozen=True, tag="request", omit_defaults=True):
    """A request reached a point of its life."""

    at: float
    request: str
    what: Literal["queued", "admitted", "first_token", "ended"]
    trace: str = ""
    tokens: int = 0  # tokens of the prompt in "queued", else of the output so far
    reason: str = ""  # why the request ended


class HistoryEvent(Struct, frozen=True, tag="history", omit_defaults=True):
    """A request that has ended, without its tokens. It suffices to replay which prefixes requests shared."""

    at: float  # when the request was submitted
    request: str
    prompt: int  # tokens
    answer: int  # tokens
    salt: int  # a number that stands for the request's salt
    block: int  # how many tokens a block has
    blocks: tuple[int, ...]
    """A number for each whole block of prompt and answer.

    Under the same salt, equal numbers mean that all tokens up to the block's end are equal.
    """
    ends: tuple[int, ...] = ()  # positions in the prompt where messages end


class DroppedEvent(Struct, frozen=True, tag="dropped"):
    """Events are missing here, because they came faster than they could be written."""

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
    """Return the event of a delivered message. It holds plain values only: a message would keep its leases alive."""
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
    """Return the grants that a message names; for a Step, those with chunks."""
    match message := envelope.message:
        case Step():
            return tuple(chunk.grant for chunk in message.chunks)
        case Stepped() | Extend():
            return tuple(dict.fromkeys(message.grants))  # a row with accepted drafts has several tokens
        case Extended():
            return tuple(addition.grant for addition in message.pages)
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
    """Return the ids of the requests that a message names."""
    match message := envelope.message:
        case Submit() | Admit() | Admitted() | Requeue():
            return (message.request.id,)
        case Delta():
            return tuple(output.request for output in message.outputs)
        case _:
            request = getattr(message, "request", None)
            return (request,) if isinstance(request, str) else ()


def request_events(envelope: Envelope, to: str, at: float) -> Iterator[RequestEvent]:
    """Yield an event for each point of a request's life that a message marks. Only messages to the api mark an end."""
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
