"""The format of session files: intact records are read back, wherever a file is cut off or damaged."""

import random
from dataclasses import replace

import msgspec
import pytest

from baton.actors import tokens
from baton.api.sessions.log import Turn, turns
from baton.api.sessions.records import (
    FRAME,
    VERSION,
    DamagedLogError,
    LogRecord,
    RewindRecord,
    SessionHeader,
    TurnRecord,
    decode,
    encode,
    frame,
    record_of,
    turn_of,
)

HEADER = SessionHeader(
    version=VERSION,
    id="s",
    owner=b"\x01" * 32,
    salt="salt",
    idle_timeout=2.5,
    branching=True,
    created=1_800_000_000,
    parent=("p", 3),
    last_number=9,
)


def turn(number: int, previous: Turn | None = None) -> Turn:
    return Turn(
        previous=previous,
        number=number,
        request=f"turn-{number}",
        start=previous.end if previous is not None else 0,
        input=tokens.pack(range(number)),
        output=tokens.pack([2**31 - 1, 0]),
        status="aborted",
        finish_reason="abort",
        messages=({"role": "user", "content": "grüß dich\n"},),
        answer="\x00☃",
        created=1_800_000_001,
        cached_tokens=7,
    )


def some_records() -> list[LogRecord]:
    first = turn(1)
    return [HEADER, record_of(first), record_of(turn(2, first)), RewindRecord(1), record_of(turn(3, first))]


def test_records_are_read_back() -> None:
    data = encode(some_records())
    assert decode(data) == (some_records(), len(data))


def test_a_turn_survives() -> None:
    first = turn(1)
    second = turn_of(record_of(turn(2, first)), {1: first})
    assert turns(second)[0] is first
    assert record_of(second) == record_of(turn(2, first))
    with pytest.raises(DamagedLogError, match="turn 2 continues turn 1"):
        turn_of(record_of(turn(2, first)), {})


def test_integers_of_any_size_survive() -> None:
    """Arguments of tool calls may contain integers of any size."""
    numbers = [2**64, -(2**63) - 1, 10**300, 2**64 - 1, True]
    call = {"function": {"name": "send", "arguments": {"wei": numbers, "of": {"x": -(10**30)}}}}
    original = replace(
        turn(1),
        messages=({"role": "assistant", "content": "", "tool_calls": [call]},),
        parts={"tool_calls": [call]},
    )
    [_, record], _ = decode(encode([HEADER, record_of(original)]))
    assert isinstance(record, TurnRecord) and (record.messages, record.parts) == (original.messages, original.parts)


def test_a_file_cut_in_its_last_record_keeps_the_others() -> None:
    *others, last = some_records()
    whole, data = encode(others), encode([*others, last])
    for size in range(len(whole), len(data)):
        assert decode(data[:size]) == (others, len(whole))


@pytest.mark.parametrize("rest", [bytes(500), b"\xff" * 500, random.Random(1).randbytes(500)])
def test_garbage_after_the_records_is_ignored(rest: bytes) -> None:
    """After a power failure a file may be longer than the data that was written."""
    data = encode(some_records())
    assert decode(data + rest) == (some_records(), len(data))


def test_a_flipped_bit_never_goes_unnoticed() -> None:
    records = some_records()
    data = encode(records)
    last = len(encode(records[:-1]))
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        if at < last:
            with pytest.raises(DamagedLogError):
                decode(bytes(damaged))
        else:
            assert decode(bytes(damaged)) == (records[:-1], last)


def test_a_damaged_length_in_the_middle_does_not_look_like_the_end() -> None:
    data = bytearray(encode(some_records()))
    at = len(encode(some_records()[:2]))
    data[at : at + 4] = (2**31).to_bytes(4, "little")
    with pytest.raises(DamagedLogError, match=f"the record at byte {at} is damaged"):
        decode(bytes(data))


@pytest.mark.parametrize("data", [b"", bytes(64), encode([HEADER])[:-1]])
def test_a_file_without_a_header(data: bytes) -> None:
    with pytest.raises(DamagedLogError, match="no header"):
        decode(data)


def test_a_version_of_the_future() -> None:
    later = {"type": "session", "version": VERSION + 1, "soul": True}
    with pytest.raises(DamagedLogError, match=f"version {VERSION + 1}"):
        decode(frame(msgspec.msgpack.encode(later)) + encode([RewindRecord(0)]))


def test_an_intact_but_invalid_record() -> None:
    with pytest.raises(DamagedLogError, match="a record is invalid"):
        decode(encode([HEADER]) + frame(msgspec.msgpack.encode({"type": "turn", "number": "one"})))
    with pytest.raises(DamagedLogError, match="a record is invalid"):
        decode(encode([HEADER]) + frame(b"\xc1"))


def test_a_frame_is_small() -> None:
    assert len(frame(b"x")) == FRAME.size + 1
    record = record_of(turn(1))
    assert isinstance(record, TurnRecord)
    assert len(encode([record])) < 300
