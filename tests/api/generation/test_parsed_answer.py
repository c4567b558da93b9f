"""Outputs parsed into reasoning, answer and calls, however they are split; reasoning is counted in tokens."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from baton.actors import tokens
from baton.actors.requests import FinishReason, Output
from baton.api.generation.answers import Answer
from baton.api.generation.parsed_answer import ParsedAnswer
from baton.api.generation.request_builder import Prompt
from baton.api.generation.served_model import ServedModel
from baton.api.generation.tools import Tool, ToolUse
from baton.models.text.formats.hermes import HERMES
from baton.models.text.formats.picking import OutputFormats
from baton.models.text.formats.qwen3_coder import QWEN3_CODER
from baton.models.text.formats.thinking import THINK
from tests.api.fake_ring import EOS, VOCAB, FakeText

TOOLS = ToolUse((Tool("add", parameters={"type": "object", "properties": {"a": {"type": "integer"}}}), Tool("now")))
ONE = ToolUse(TOOLS.tools, parallel=False)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nHm é.\n</think>\n\n"


def model(formats: OutputFormats | None = None) -> ServedModel:
    formats = formats or OutputFormats(HERMES, THINK)
    return ServedModel(FakeText(), VOCAB, 1000, formats=formats)


def outputs(text: str, size: int, end: FinishReason = "stop") -> Iterator[Output]:
    """Return the text as outputs of `size` characters each, with their tokens; the last output ends with EOS."""
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    for piece in pieces:
        yield Output("r", piece, tokens.pack(list(piece.encode())), 1, 0)
    yield Output("r", "", tokens.pack([EOS] if end == "stop" else []), 1, 0, end)


def parsed(
    text: str, size: int, use: ToolUse = TOOLS, begun: bool = False, end: FinishReason = "stop", **more: Any
) -> ParsedAnswer:
    answer = ParsedAnswer(model(**more), Prompt([1], in_reasoning=begun), use)
    for output in outputs(text, size, end):
        answer.add(output)
    return answer


def outline(answer: ParsedAnswer) -> tuple[str, str, list[tuple[str, str, bool]], int, str | None]:
    calls = [(call.name, call.arguments, call.whole) for call in answer.calls]
    return answer.reasoning, answer.content, calls, answer.reasoning_tokens, answer.finish_reason


ADD = ("add", '{"a": 1}', True)
UP_TO_END = len("<think>\nHm é.\n</think>".encode())


@pytest.mark.parametrize(
    "text, use, expected",
    [
        ("Yes.", TOOLS, ("", "Yes.", [], 0, "stop")),
        (THOUGHT + "Yes." + CALL, TOOLS, ("Hm é.", "Yes.", [ADD], UP_TO_END, "tool_calls")),
        (THOUGHT, TOOLS, ("Hm é.", "", [], UP_TO_END, "stop")),
        ("<think>\nHm", TOOLS, ("Hm", "", [], len("<think>\nHm") + 1, "stop")),
        (CALL + NOW, TOOLS, ("", "", [ADD, ("now", "{}", True)], 0, "tool_calls")),
        (CALL + NOW, ONE, ("", "", [ADD], 0, "tool_calls")),
        (CALL, ToolUse(TOOLS.tools, "none"), ("", CALL, [], 0, "stop")),
        (CALL[:-20], TOOLS, ("", "", [("add", '{"a": 1}'[: len(CALL[:-20]) - CALL.index('{"a"')], False)], 0, "stop")),
    ],
    ids=["text", "all", "thought", "thinking", "two", "the first of two", "without tools", "cut off"],
)
def test_every_split_gives_the_same(text: str, use: ToolUse, expected: tuple[Any, ...]) -> None:
    for size in range(1, len(text) + 1):
        assert outline(parsed(text, size, use)) == expected
    whole = Answer([text], [*text.encode(), EOS], finish_reason="stop")
    assert outline(ParsedAnswer.of(whole, model(), Prompt([1]), use)) == expected


def test_a_prompt_may_begin_the_reasoning() -> None:
    for size in (1, 5, 100):
        answer = parsed("Hm.</think>Yes.", size, begun=True)
        assert outline(answer) == ("Hm.", "Yes.", [], len("Hm.</think>"), "stop")


def test_reasoning_is_counted_to_where_a_call_ends_it() -> None:
    text = "<think>Hm. <tool_call> is how. <tool_call>\n<function=now>\n</function>\n</tool_call>"
    for size in (1, 7, 200):
        answer = parsed(text, size, formats=OutputFormats(QWEN3_CODER, THINK))
        assert [call.name for call in answer.calls] == ["now"]
        assert answer.reasoning_tokens == text.index("<function=") + len("<function=")


@pytest.mark.parametrize("length", [10, 60, 63, 64, 70, 1000])
def test_long_reasoning_is_counted_by_tokens(length: int) -> None:
    text = "<think>" + "x" * length + "</think>" + "y" * 200
    for size in (1, 90, 2000):
        assert parsed(text, size).reasoning_tokens == len("<think></think>") + length


def test_a_call_cut_by_length_keeps_the_finish_reason() -> None:
    answer = parsed(CALL, 3, end="length")
    assert (answer.finish_reason, answer.called) == ("length", True)


def test_calls_have_ids_of_their_own() -> None:
    ids = [call.id for size in (1, 100) for call in parsed(CALL + NOW, size).calls]
    assert len(set(ids)) == 4 and all(id.startswith("call_") for id in ids)


def test_finish_returns_text_that_was_held_back() -> None:
    answer = ParsedAnswer(model(), Prompt([1]), TOOLS)
    answer.read("Hm <tool_", list(b"Hm <tool_"))
    events = answer.finish(None)
    assert answer.content == "Hm <tool_" and events and answer.finish(None) == []


def test_arguments_come_in_pieces() -> None:
    answer = ParsedAnswer(model(), Prompt([1]), TOOLS)
    pieces: Sequence[Any] = [event for output in outputs(CALL, 1) for event in answer.add(output)]
    shown = [event.json for event in pieces if hasattr(event, "json")]
    assert len(shown) > 3 and json.loads("".join(shown)) == {"a": 1}
