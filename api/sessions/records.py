"""The format of a session's file: records behind one another, each with its length and checksums, so that every byte of
damage shows.

The first record is the SessionHeader; then come turns in the order of their numbers, and rewinds.
"""

import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct

from baton.actors.tokens import Tokens
from baton.api.sessions.log import Turn, TurnStatus

VERSION = 1
BIG = 1  # the code of integers beyond 64 bits, which msgpack does not have: their digits
FRAME = struct.Struct("<III")


class DamagedLogError(Exception):
    """The file cannot be read as a session."""


class SessionHeader(Struct, frozen=True, tag="session"):
    """What a session is apart from its turns. last_number: also of turns that are gone."""

    version: int
    id: str
    owner: bytes
    salt: str
    idle_timeout: float
    branching: bool
    created: int
    parent: tuple[str, int] | None
    last_number: int
    metadata: dict[str, str] = {}


class TurnRecord(Struct, frozen=True, tag="turn"):
    """A Turn; previous: the number of the one that it went on from, 0 for none."""

    previous: int
    number: int
    request: str
    start: int
    input: Tokens
    output: Tokens
    status: TurnStatus
    finish_reason: str | None
    messages: tuple[dict[str, Any], ...] | None
    answer: str | None
    created: int
    cached_tokens: int
    parts: dict[str, Any] | None = None


class RewindRecord(Struct, frozen=True, tag="rewind"):
    """The session stands behind this turn, or at its beginning (0)."""

    number: int


LogRecord: TypeAlias = SessionHeader | TurnRecord | RewindRecord


class Versioned(Struct, tag="session"):
    """What headers of every version have."""

    version: int


COMMON = tuple(name for name in TurnRecord.__struct_fields__ if name != "previous")


def record_of(turn: Turn) -> TurnRecord:
    previous = turn.previous.number if turn.previous is not None else 0
    common = {name: getattr(turn, name) for name in COMMON}
    said = {name: packable(common[name]) for name in ("messages", "parts")}
    return TurnRecord(previous=previous, **common | said)


def turn_of(record: TurnRecord, known: Mapping[int, Turn]) -> Turn:
    """Raises DamagedLogError if what it went on from is not known."""
    if record.previous and record.previous not in known:
        raise DamagedLogError(f"turn {record.number} goes on from {record.previous}, which is not there")
    return Turn(previous=known.get(record.previous), **{name: getattr(record, name) for name in COMMON})


def packable(value: Any) -> Any:
    """The same with what msgpack does not have as what it has; clients choose how large the arguments of calls are."""
    match value:
        case dict():
            return {key: packable(each) for key, each in value.items()}
        case list() | tuple():
            return type(value)(map(packable, value))
        case int() if not -(2**63) <= value < 2**64:
            return msgspec.msgpack.Ext(BIG, str(value).encode())
        case _:
            return value


def unpacked(code: int, data: memoryview) -> int:
    if code != BIG:
        raise ValueError(f"extension {code} is not known")
    return int(bytes(data))


def encode(records: Iterable[LogRecord]) -> bytes:
    return b"".join([frame(msgspec.msgpack.encode(record)) for record in records])


def frame(payload: bytes) -> bytes:
    """The length has a checksum of its own: a wrong one must not look like the end of the file."""
    length, checksum = len(payload), zlib.crc32(payload)
    return FRAME.pack(length, checksum, zlib.crc32(struct.pack("<II", length, checksum))) + payload


def decode(data: bytes) -> tuple[list[LogRecord], int]:
    """The records, and how many bytes of `data` they are: what is behind them was cut off in mid-write.

    Raises DamagedLogError.
    """
    payloads, end = split(data)
    if not payloads:
        raise DamagedLogError("it has no header")
    try:
        version = msgspec.msgpack.decode(payloads[0], type=Versioned).version
        if version != VERSION:
            raise DamagedLogError(f"it has version {version}, and this server reads {VERSION}")
        decoder = msgspec.msgpack.Decoder(LogRecord, ext_hook=unpacked)
        records: Sequence[LogRecord] = [decoder.decode(payload) for payload in payloads]
    except (msgspec.MsgspecError, ValueError) as error:
        raise DamagedLogError(f"a record is wrong: {error}") from None
    return list(records), end


def split(data: bytes) -> tuple[list[bytes], int]:
    """The payloads up to the first frame that is not whole, and where that begins.

    Raises DamagedLogError if others follow.
    """
    payloads = []
    view, at = memoryview(data), 0
    while (payload := frame_at(view, at)) is not None:
        payloads.append(bytes(payload))
        at += FRAME.size + len(payload)
    if any(frame_at(view, later) is not None for later in range(at + 1, len(data) - FRAME.size + 1)):
        raise DamagedLogError(f"the record at byte {at} is damaged")
    return payloads, at


def frame_at(view: memoryview, at: int) -> memoryview | None:
    """The payload of the whole and sound frame that begins here."""
    if at + FRAME.size > len(view):
        return None
    length, checksum, of_both = FRAME.unpack_from(view, at)
    if zlib.crc32(view[at : at + 8]) != of_both:
        return None
    payload = view[at + FRAME.size : at + FRAME.size + length]
    return payload if len(payload) == length and zlib.crc32(payload) == checksum else None
