"""The format of a session's file: a sequence of frames. Each frame has one record, and checksums that reveal damage.

    frame:  length u32 | CRC-32 of the payload u32 | CRC-32 of these 8 bytes u32 | payload (msgpack)

The first record is the SessionHeader. TurnRecords, in the order of their numbers, and RewindRecords follow.
"""

import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta, Struct

from baton.actors.tokens import Tokens
from baton.api.sessions.log import Turn, TurnStatus

VERSION = 1
BIG = 1  # code of the msgpack extension for integers beyond 64 bits, written as decimal digits
FRAME = struct.Struct("<III")
Number: TypeAlias = Annotated[int, Meta(ge=0, le=2**53)]  # leaves room below 64 bits for later turns, which count on


class DamagedLogError(Exception):
    """A file that cannot be read as a session."""


class SessionHeader(Struct, frozen=True, tag="session"):
    """The record with the fields of a session other than its turns."""

    version: int
    id: str
    owner: bytes
    salt: str
    idle_timeout: Annotated[float, Meta(ge=0)]
    branching: bool
    created: Number
    parent: tuple[str, Number] | None  # id and turn of the session from which this one was forked
    last_number: Number  # highest number of a turn that was ever used, including deleted turns
    metadata: dict[str, str] = {}


class TurnRecord(Struct, frozen=True, tag="turn"):
    """The record of one Turn."""

    previous: Number  # number of the turn that this turn continues, 0 for none
    number: Number
    request: str
    start: Number
    input: Tokens
    output: Tokens
    status: TurnStatus
    finish_reason: str | None
    messages: tuple[dict[str, Any], ...] | None
    answer: str | None
    created: Number
    cached_tokens: Number
    parts: dict[str, Any] | None = None


class RewindRecord(Struct, frozen=True, tag="rewind"):
    """The record of a rewind, which changes the session's last turn."""

    number: Number  # number of the new last turn; 0 for none


LogRecord: TypeAlias = SessionHeader | TurnRecord | RewindRecord


class Versioned(Struct, tag="session"):
    """The part of a SessionHeader that all versions of the format have."""

    version: int


# Fields that TurnRecord and Turn share.
COMMON = tuple(name for name in TurnRecord.__struct_fields__ if name != "previous")


def record_of(turn: Turn) -> TurnRecord:
    """Return the record of a turn."""
    previous = turn.previous.number if turn.previous is not None else 0
    common = {name: getattr(turn, name) for name in COMMON}
    texts = {name: packable(common[name]) for name in ("messages", "parts")}
    return TurnRecord(previous=previous, **common | texts)


def turn_of(record: TurnRecord, known: Mapping[int, Turn]) -> Turn:
    """Return the turn of a record. Raises DamagedLogError if the turn that it continues is not in `known`."""
    if record.previous and record.previous not in known:
        raise DamagedLogError(f"turn {record.number} continues turn {record.previous}, which is missing")
    return Turn(previous=known.get(record.previous), **{name: getattr(record, name) for name in COMMON})


def packable(value: Any) -> Any:
    """Return a value that msgpack can encode: integers beyond 64 bits, which tool calls may contain, as extensions."""
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
    """Decode a msgpack extension: an integer beyond 64 bits. Raises ValueError for another extension."""
    if code != BIG:
        raise ValueError(f"unknown extension {code}")
    return int(bytes(data))


def encode(records: Iterable[LogRecord]) -> bytes:
    """Encode records as a sequence of frames."""
    return b"".join([frame(msgspec.msgpack.encode(record)) for record in records])


def frame(payload: bytes) -> bytes:
    """Return the frame of a payload. Its length has a checksum, or else damage to it would look like a cut-off file."""
    length, checksum = len(payload), zlib.crc32(payload)
    return FRAME.pack(length, checksum, zlib.crc32(struct.pack("<II", length, checksum))) + payload


def decode(data: bytes) -> tuple[list[LogRecord], int]:
    """Return the records and their length in bytes. Data after that length is a record that a crash cut off.

    Raises DamagedLogError if the header or a record is invalid.
    """
    payloads, end = split(data)
    if not payloads:
        raise DamagedLogError("it has no header")
    try:
        version = msgspec.msgpack.decode(payloads[0], type=Versioned).version
        if version != VERSION:
            raise DamagedLogError(f"it has version {version}, but this server reads version {VERSION}")
        decoder = msgspec.msgpack.Decoder(LogRecord, ext_hook=unpacked)
        records: Sequence[LogRecord] = [decoder.decode(payload) for payload in payloads]
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise DamagedLogError(f"a record is invalid: {error}") from None
    return list(records), end


def split(data: bytes) -> tuple[list[bytes], int]:
    """Return the payloads before the first incomplete or damaged frame, and the position of that frame.

    Raises DamagedLogError if an intact frame follows, because the data is then damaged, and not just cut off.
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
    """Return the payload of the frame at byte `at`, or None if the frame is incomplete or damaged."""
    if at + FRAME.size > len(view):
        return None
    length, checksum, header_checksum = FRAME.unpack_from(view, at)
    if zlib.crc32(view[at : at + 8]) != header_checksum:
        return None
    payload = view[at + FRAME.size : at + FRAME.size + length]
    return payload if len(payload) == length and zlib.crc32(payload) == checksum else None
