"""Copying of streams, and what is left out of a stream that another engine continues."""

import msgspec
import pytest

from baton.actors.tokens import pack
from baton.api.events.places import PLACES, split_places
from baton.api.resuming import COMMENT, Begun, SentPart, TokensSent, comment
from baton.api.routing.streams import StreamCopy

FIRST, SECOND = "chatcmpl-" + "a" * 32, "chatcmpl-" + "b" * 32


def frame(id: str, text: str, created: int = 7) -> bytes:
    return b"data: " + msgspec.json.encode({"id": id, "created": created, "text": text}) + b"\n\n"


def passed(*tokens: int, ended: bool = False) -> bytes:
    return comment(TokensSent(parts=[SentPart(0, pack(tokens), len(tokens), ended)]))


def begun(id: str) -> bytes:
    return comment(Begun(ids=[id], seeds=[5], limits=[9], weights="w"))


OPENING, A, B, C = (frame(FIRST, text) for text in ("", "a", "b", "c"))


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_stream_is_copied_without_its_comments(size: int) -> None:
    stream = OPENING + begun(FIRST) + A + passed(1) + b": ping\n\n" + B + C + passed(2, 3) + PLACES + b"9 9:ff\n\n"
    copy = StreamCopy()
    chunks = [stream[at : at + size] for at in range(0, len(stream), size)]
    assert b"".join(map(copy.take, chunks)) == OPENING + A + b": ping\n\n" + B + C
    assert copy.places == "9 9:ff"


@pytest.mark.parametrize(
    "comment",
    [
        COMMENT + b"{\n\n",
        COMMENT + b'{"event":"later version"}\n\n',
        COMMENT + b"\xff\n\n",
        COMMENT + b"[" * 100_000 + b"\n\n",
        comment(TokensSent(parts=[SentPart(0, pack([2]), 2), SentPart(1, pack([2]), 2)])),
        comment(TokensSent(parts=[SentPart(-1, pack([2]), 2)])),
        comment(Begun(ids=[], seeds=[], limits=[], weights="")),
    ],
    ids=["no JSON", "unknown", "no text", "nested", "no such sequence", "before the first", "no sequence"],
)
@pytest.mark.parametrize("before", [b"", A + passed(3)], ids=["plain", "after another"])
def test_a_comment_that_cannot_be_read_is_a_fault(comment: bytes, before: bytes) -> None:
    """The client gets the events before, and not those of the comment, and another engine continues exactly there."""
    copy = StreamCopy()
    copy.take(OPENING + begun(FIRST) + A + passed(1))
    assert copy.take(before + B + comment + C + passed(4)) == (A if before else b"") and copy.fault
    resumption = copy.resumption
    assert resumption is not None and resumption.parts == [SentPart(0, pack([1, 3] if before else [1]), 1)]
    assert copy.can_go_on and not copy.complete
    copy.begin_again()
    again = frame(SECOND, "") + begun(SECOND) + frame(SECOND, "a") + passed(1)
    assert copy.take(again + frame(SECOND, "b") + passed(2)) == B and not copy.fault


def test_a_beginning_without_a_sequence_is_no_complete_stream() -> None:
    copy = StreamCopy()
    copy.take(OPENING + comment(Begun(ids=[], seeds=[], limits=[], weights="")))
    assert copy.fault and not copy.complete and copy.resumption is None


def test_tokens_before_the_beginning_are_a_fault() -> None:
    """Also in the stream of an engine that continues another one's."""
    copy = StreamCopy()
    assert copy.take(OPENING + A + passed(1)) == b"" and copy.fault
    assert copy.resumption is None and copy.can_go_on
    copy.begin_again()
    assert copy.take(OPENING + begun(FIRST) + A + passed(1)) == OPENING + A and not copy.fault
    copy.begin_again()
    assert copy.take(frame(SECOND, "") + passed(1) + frame(SECOND, "b") + passed(2)) == b"" and copy.fault


@pytest.mark.parametrize(
    ("chunk", "events", "places"),
    [
        (A + PLACES + b"9 9:ff\n\n", A, "9 9:ff\n\n"),
        (PLACES + b"9 9:ff\n\n", b"", "9 9:ff\n\n"),
        (PLACES + b"\xff", b"", "\ufffd"),
        (frame(FIRST, "a: places 9"), frame(FIRST, "a: places 9"), ""),
        (frame(FIRST, "\n\n: places 9 9:ff"), frame(FIRST, "\n\n: places 9 9:ff"), ""),
        (b"", b"", ""),
    ],
)
def test_only_a_comment_has_places(chunk: bytes, events: bytes, places: str) -> None:
    assert split_places(chunk) == (events, places)


def test_another_engine_continues_after_the_tokens_that_were_passed_on() -> None:
    copy = StreamCopy()
    assert copy.take(OPENING + begun(FIRST) + A + passed(1) + B) == OPENING + A
    resumption = copy.resumption
    assert resumption is not None
    assert resumption.begun == Begun(ids=[FIRST], seeds=[5], limits=[9], weights="w")
    assert resumption.parts == [SentPart(0, pack([1]), 1)]
    copy.begin_again()
    again = frame(SECOND, "", 8) + begun(SECOND) + frame(SECOND, "a", 8) + passed(1)
    assert copy.take(again + frame(SECOND, "b", 8) + passed(2)) == B
    resumption = copy.resumption
    assert resumption is not None and resumption.parts == [SentPart(0, pack([1, 2]), 1)]


def test_another_engine_begins_a_stream_of_which_the_client_has_nothing() -> None:
    copy = StreamCopy()
    assert copy.take(OPENING) == b"" and copy.can_go_on and copy.resumption is None
    copy.begin_again()
    assert copy.take(OPENING + begun(FIRST) + A + passed(1)) == OPENING + A


def test_a_stream_that_has_ended_is_complete_though_its_connection_was_cut() -> None:
    copy = StreamCopy()
    copy.take(OPENING + begun(FIRST) + A + passed(1))
    assert copy.can_go_on and not copy.complete
    copy.take(B + passed(2, ended=True))
    assert copy.complete and not copy.can_go_on


def test_a_chunk_with_several_comments_is_read_frame_by_frame() -> None:
    """A chunk of events with one comment after them, which is almost every chunk, is read in place instead."""
    copy = StreamCopy()
    copy.take(OPENING + begun(FIRST) + A + passed(1))
    assert copy.take(A + B + passed(2, 3)) == A + B
    assert copy.take(A + passed(4) + B + passed(5) + PLACES + b"9 9:ff\n\n") == A + B
    assert copy.take(b": ping\n\n" + C + passed(6)) == b": ping\n\n" + C
    assert copy.take(C[:9]) == b"" and copy.take(C[9:] + passed(7)) == C
    assert copy.take(A) == b"" and copy.take(B + passed(8)) == A + B
    resumption = copy.resumption
    assert resumption is not None and resumption.parts == [SentPart(0, pack([*range(1, 9)]), 1)]
    assert copy.places == "9 9:ff"
