"""Readers of a transcript: whenever they read and however the output is split, they see one numbered event stream."""

from collections import defaultdict
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from baton.actors import tokens
from baton.actors.requests import Output, Request, Sampling, Stops
from baton.api.errors import ApiError
from baton.api.generation.outputs import Member
from baton.api.generation.parsed_answer import ParsedAnswer
from baton.api.generation.request_builder import Prompt
from baton.api.generation.served_model import ServedModel
from baton.api.generation.tools import Tool, ToolUse
from baton.api.responses.events import EventCursor, Transcript
from tests.api.fake_ring import AGENT, VOCAB, FakeText

MODEL = ServedModel(FakeText(), VOCAB, 10_000, formats=AGENT)
USE = ToolUse((Tool("a"),))
CALL = '<tool_call>{"name": "a", "arguments": {"x": [1, 2]}}</tool_call>'
PARTS = st.sampled_from(["<think>Hm.</think>", "Yes. ", CALL, CALL[:-30], "<tool_", "\n", "é"])


def member(finish: str | None) -> Member:
    request = Request("resp_1", b"", 0, Sampling(), Stops(10))
    made: Any = Member(0, request, None, 0.0)  # type: ignore[arg-type]
    made.finish_reason = finish
    return made  # type: ignore[no-any-return]


def body(background: bool) -> dict[str, Any]:
    return {"id": "resp_1", "background": background, "status": "queued" if background else "in_progress"}


def read_on(cursor: EventCursor, transcript: Transcript, events: list[dict[str, Any]]) -> None:
    new = transcript.events(cursor._next)
    cursor._next += len(new)
    events += new


@settings(deadline=None, max_examples=150)
@given(
    parts=st.lists(PARTS, max_size=6),
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    readers=st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=3),
    background=st.booleans(),
    finish=st.sampled_from(["stop", "length", None]),
)
def test_all_readers_see_one_stream(
    parts: list[str], sizes: list[int], readers: list[list[bool]], background: bool, finish: Any
) -> None:
    text, at = "".join(parts), 0
    transcript = Transcript(body(background), ParsedAnswer(MODEL, Prompt([1]), USE, "resp_1"))
    cursors, seen = [EventCursor(transcript) for _ in readers], [list[dict[str, Any]]() for _ in readers]
    turn = 0
    while at < len(text):
        piece = text[at : at + sizes[turn % len(sizes)]]
        at += len(piece)
        transcript.add(Output("resp_1", piece, tokens.pack(list(piece.encode())), 1, 0))
        for cursor, events, reads in zip(cursors, seen, readers, strict=True):
            if reads[turn % len(reads)]:
                read_on(cursor, transcript, events)
        turn += 1
    transcript.finish("completed" if finish == "stop" else "incomplete", member(finish))
    for cursor, events in zip(cursors, seen, strict=True):
        while not cursor.over:
            read_on(cursor, transcript, events)
        assert events == (seen[0])
    check(seen[0], transcript)


def check(events: list[dict[str, Any]], transcript: Transcript) -> None:
    assert [event["sequence_number"] for event in events] == list(range(transcript.count)) == list(range(len(events)))
    output, deltas = transcript.body["output"], defaultdict[int, str](str)
    done = {event["output_index"]: event["item"] for event in events if event["type"] == "response.output_item.done"}
    for event in events:
        if event["type"].endswith(".delta"):
            deltas[event["output_index"]] += event["delta"]
    assert list(done.values()) == output and list(done) == list(range(len(output)))
    for index, item in enumerate(output):
        content = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert deltas[index] == content
    texts = [item["content"][0]["text"] for item in output if item["type"] == "message"]
    assert transcript.message["content"] == "".join(texts)


def test_a_cursor_beyond_the_events_is_refused() -> None:
    transcript = Transcript(body(False), ParsedAnswer(MODEL, Prompt([1])))
    with pytest.raises(ApiError):
        EventCursor(transcript, 2)


@settings(deadline=None, max_examples=100)
@given(
    parts=st.lists(PARTS, min_size=1, max_size=6),
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    share=st.floats(0, 1),
    finish=st.sampled_from(["stop", "length"]),
)
def test_a_stream_that_another_engine_continues_is_one_stream(
    parts: list[str], sizes: list[int], share: float, finish: str
) -> None:
    first, second = (Transcript(body(False), ParsedAnswer(MODEL, Prompt([1]), USE, "resp_1")) for _ in range(2))
    text = "".join(parts)
    cursor, events, at = EventCursor(first), list[dict[str, Any]](), 0
    while at < share * len(text):
        piece = text[at : at + sizes[len(events) % len(sizes)]]
        first.add(Output("resp_1", piece, b"", 1, 0))
        at += len(piece)
        while not cursor.caught_up:
            read_on(cursor, first, events)
    read_on(cursor, first, events)
    second.take_over(Output("resp_1", text[:at], b"", 1, 0), cursor.position)
    assert second.taken_over == second.count == cursor.position
    with pytest.raises(ApiError, match="lost with its engine") if second.count > 1 else nullcontext():
        EventCursor(second, 0)
    cursor = EventCursor(second, second.count - 1)
    second.add(Output("resp_1", text[at:], b"", 1, 0))
    second.finish("completed" if finish == "stop" else "incomplete", member(finish))
    while not cursor.over:
        read_on(cursor, second, events)
    check(events, second)
