"""Every frame of a link between two engines. Frames are msgpack; a frame is a tagged array.

The *sink* wants a state, and the *source* has or computes it. Each engine can be both on one link. A ticket is chosen
by the sink, and counts only on the connection on which it was first sent::

    sink ── Compute or Fetch ──▶ source
    sink ◀── Rows or Declined ── source      Rows: the source lends a copy in its host memory
                                             the sink's mover reads the copy into host memory of its own
    sink ── Taken ─────────────▶ source
    sink ◀── Released or Gone ── source      Released: the loan held until Taken arrived, so what was read is right

The sink may send CancelTicket at any time, and then ignores later frames about the ticket.

Hand and Give are sent by an engine that gives a session or state away. The peer then fetches the state as a sink.
"""

from typing import Literal, TypeAlias

import msgspec
from msgspec import Struct

from baton.actors.tokens import Tokens

VERSION = 3
Role: TypeAlias = Literal["both", "prefill", "decode"]


class Hello(Struct, frozen=True, tag=True, array_like=True):
    """The first frame of each side: what the engine is. A link is refused if a field of MUST_AGREE differs."""

    version: int
    engine: str  # the engine's name: --engine-name, or HOST:PORT
    boot: str  # random, new at each start of the engine
    role: Role  # as in --role: what the engine prefers to compute
    model: str  # fingerprint of the weights, their dtype and the layout of states
    dtype: str  # dtype of the weights
    state_dtype: str
    quantize: str  # how projection weights and activations are quantized
    page_size: int  # tokens of a page; 0 without attention
    state_bytes: int
    page_bytes: int
    mover: str  # the name of the mover
    token: bytes = b""  # chosen by the listening side; the mover's two connections name the link with it


MUST_AGREE = (
    "version", "dtype", "state_dtype", "quantize", "page_size", "model", "state_bytes", "page_bytes", "mover"
)  # fmt: skip
"""Compared in this order. Fields that `model` includes come before it, so that errors name the field that differs."""


class AnyHello(Struct, frozen=True, tag="Hello", array_like=True):
    """The part of a Hello that is the same in every version. Engines of another version may send other fields."""

    version: int


class Beat(Struct, frozen=True, tag=True, array_like=True):
    """A sign of life every half second, with the engine's load."""

    queue_seconds: float = 0.0  # time to compute the prompts that wait or are being computed
    token_seconds: float = 0.0  # seconds for one prompt token; 0: not measured yet
    rows: int = 0
    draining: bool = False  # the engine accepts no requests, because it is shutting down or paused


class Compute(Struct, frozen=True, tag=True, array_like=True):
    """sink → source: make the state at the end of these tokens, and lend it."""

    ticket: int
    salt: str
    tokens: Tokens
    have: int  # position of the deepest state that the sink has on this path; 0: none
    first_page: int  # the sink needs no KV of the pages before this one
    priority: int
    trace: str  # the trace id of the client's request


class Fetch(Struct, frozen=True, tag=True, array_like=True):
    """sink → source: lend the deepest state on the path of these tokens, without computing anything."""

    ticket: int
    salt: str
    tokens: Tokens
    least: int  # least position of use: a state before it is not worth reading
    first_page: int


class Rows(Struct, frozen=True, tag=True, array_like=True):
    """source → sink: a copy of the state at this position is lent, and can be read."""

    ticket: int
    position: int
    first_page: int  # the first page whose KV can be read
    where: bytes  # the location of the copy, for the sink's mover


class Declined(Struct, frozen=True, tag=True, array_like=True):
    """source → sink: the state does not exist, and will not be computed."""

    ticket: int
    why: str


class Taken(Struct, frozen=True, tag=True, array_like=True):
    """sink → source: the copy has been read. The source ends the loan."""

    ticket: int


class Released(Struct, frozen=True, tag=True, array_like=True):
    """source → sink, the answer to Taken: the loan held until now, so what was read may be used."""

    ticket: int


class Gone(Struct, frozen=True, tag=True, array_like=True):
    """source → sink: the loan has ended early, or there is none. The bytes that were read must not be used."""

    ticket: int
    why: str


class CancelTicket(Struct, frozen=True, tag=True, array_like=True):
    """sink → source: the state is not wanted any more."""

    ticket: int


class Hand(Struct, frozen=True, tag=True, array_like=True):
    """source → sink: take over this session, and fetch its state from the source. Answered by Handed."""

    ticket: int
    log: bytes  # the session's records, as in its file
    position: int  # tokens that the session's state has consumed; 0: the source has no state


class Give(Struct, frozen=True, tag=True, array_like=True):
    """source → sink: fetch the state at the end of these tokens, before the source shuts down. Answered by Handed."""

    ticket: int
    salt: str
    tokens: Tokens


class Handed(Struct, frozen=True, tag=True, array_like=True):
    """sink → source, the answer to Hand or Give: the sink has the session or state now, unless there is an error.

    A session counts as taken over even if its state could not be fetched.
    """

    ticket: int
    error: str  # why the session or state was not taken over; "" if it was


Frame: TypeAlias = (
    Hello | Beat | Compute | Fetch | Rows | Declined | Taken | Released | Gone | CancelTicket | Hand | Give | Handed
)
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Frame)
_ANY_HELLO = msgspec.msgpack.Decoder(AnyHello)


def encode(frame: Frame) -> bytes:
    return _ENCODER.encode(frame)


def decode(data: bytes) -> Frame:
    """Decode a frame. Raises msgspec.DecodeError or msgspec.ValidationError if the data is not a frame."""
    frame: Frame = _DECODER.decode(data)
    return frame


def version_of(hello: bytes) -> int:
    """Return the version of an encoded Hello of any version. Raises as `decode` does."""
    return _ANY_HELLO.decode(hello).version


def disagreement(ours: Hello, theirs: Hello) -> str:
    """Return the first field of MUST_AGREE in which two engines differ, with both values; "" if they agree."""
    for name in MUST_AGREE:
        mine, other = getattr(ours, name), getattr(theirs, name)
        if mine != other:
            return f"{name} is {mine} here and {other} at the peer"
    return ""
