"""Arbitrary outputs: nothing raises, no text is lost, and the split into pieces makes no difference."""

import re
import time
from itertools import product

import pytest
from hypothesis import given, settings, strategies as st

from baton.models.text.formats.content import ToolFormat
from baton.models.text.formats.events import CallBegun, Content, Reasoning
from baton.models.text.formats.parser import OutputParser
from baton.models.text.formats.picking import TOOL_FORMATS
from baton.models.text.formats.thinking import THINK
from tests.models.text.formats.parsing import calls_of, content_of, is_object, joined, parse

FORMATS = list(TOOL_FORMATS.values())
TOOLS = {"f": {"properties": {"a": {"type": "string"}, "b": {"type": "integer"}, "c": {"type": ["string", "null"]}}}}
# Parts of calls in all formats, whole and cut.
SHREDS = [
    *("<tool_call>", "</tool_call>", "<TOOLCALL>", "</TOOLCALL>", "<function=f>", "<function=g>", "</function>"),
    *("<parameter=a>", "<parameter=b>", "<parameter=c>", "</parameter>", "<tool_c", "all>", "</para", "<", ">", "</"),
    *('<tool_call>{"name": "f", "arguments": {"a": ', '<TOOLCALL>[{"name": "f", "arguments": {}', "}</tool_call>"),
    *("<tool_call><function=f><parameter=a>", "<tool_call>\n<function=f>\n<parameter=b>\n", "</parameter></function>"),
    *('{"name": "f", "arguments": ', '{"name": "f"', '"arguments": {', '{"a": "', '{"a": 1}', "}", "{", "]", "[", ","),
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    *("<|tool_calls_section_end|>", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{", "<|tool_", "f:1"),
    *("<|tool_call_start|>", "<|tool_call_start|>[f(a=", "f(", "b=", ")", ", g()", "'", "\\x4", ")]<|tool_call_end|>"),
    *('"', "\\", "\\u00e9", "\\", ":", "12", "null", "None", "true", "\n", " ", "é", "x", "<think>", "</think>"),
]
texts = st.lists(st.sampled_from(SHREDS) | st.text(max_size=3), max_size=25).map("".join)
formats = st.sampled_from(FORMATS)


@settings(max_examples=400)
@given(text=texts, format=formats, thinks=st.booleans(), begun=st.booleans(), data=st.data())
def test_pieces_make_no_difference(
    text: str, format: ToolFormat, thinks: bool, begun: bool, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    reasoning = THINK if thinks else None
    expected = parse([text], format, TOOLS, reasoning, begun)
    assert parse(pieces, format, TOOLS, reasoning, begun) == expected
    assert parse(list(text), format, TOOLS, reasoning, begun) == expected


@settings(max_examples=400)
@given(text=texts, format=formats)
def test_calls_are_whole_if_and_only_if_their_arguments_are(text: str, format: ToolFormat) -> None:
    for _, arguments, whole in calls_of(parse([text], format, TOOLS)):
        assert is_object(arguments) == whole


@settings(max_examples=400)
@given(text=texts, format=formats)
def test_text_without_calls_is_unchanged(text: str, format: ToolFormat) -> None:
    events = parse([text], format, TOOLS)
    if not any(isinstance(event, CallBegun) for event in events):
        assert events == ([Content(text)] if text else [])


@settings(max_examples=400)
@given(text=texts, format=formats)
def test_content_around_calls_is_in_the_text_in_order(text: str, format: ToolFormat) -> None:
    """The content is the text without the calls; each call is one contiguous span, with the white space around it."""
    events = parse([text], format, TOOLS)
    contents = [re.escape(event.text) for event in events if isinstance(event, Content)]
    at_start = bool(events) and isinstance(events[0], Content)
    at_end = bool(events) and isinstance(events[-1], Content)
    call = "(?s:.*)"
    pattern = ("" if at_start else call) + call.join(contents) + ("" if at_end else call)
    assert re.fullmatch(pattern, text)


def shown_after_each(text: str, format: ToolFormat) -> list[str]:
    parser, events = OutputParser(tool_format=format), []
    shown: list[str] = []
    for character in text:
        events += parser.push(character)
        shown.append(content_of(events))
    return shown


@given(
    text=st.text(st.sampled_from("ab \n<|tol_>=fu"), max_size=30),
    format=formats,
)
def test_only_white_space_and_beginnings_of_markers_are_held_back(text: str, format: ToolFormat) -> None:
    if any(marker in text for marker in format.begins):
        return
    for end, shown in enumerate(shown_after_each(text, format), start=1):
        waiting = text[len(shown) : end].lstrip(" \n")
        assert not waiting or any(marker.startswith(waiting) for marker in format.begins)


def test_without_formats_nothing_is_held_back() -> None:
    parser = OutputParser()
    assert parser.push(" <think>") == [Content(" <think>")]
    assert parser.push("") == []
    assert parser.push("<tool_call>") == [Content("<tool_call>")]
    assert parser.finish() == []


def test_finish_returns_what_is_held_back() -> None:
    parser = OutputParser(THINK, tool_format=FORMATS[0])
    assert parser.push(" <thi") == []
    assert parser.finish() == [Content(" <thi")]
    parser = OutputParser(THINK, begun=True)
    assert joined(parser.push("a\n</thi") + parser.finish()) == [Reasoning("a\n</thi")]


CALL = '<tool_call>{"name":"f","arguments":{"a":'
HOSTILE = {
    "half a marker": "<tool_ca",
    "first characters": "<",
    "markers": "<tool_call>",
    "markers of functions": "<tool_call><function=",
    "markers of sections": "<|tool_calls_section_begin|>",
    "markers of heads": "<|tool_call_begin|>",
    "markers after heads": "<|tool_call_argument_begin|>",
    "heads": "<|tool_call_begin|>f:0<|tool_call_argument_begin|>",
    "ends of heads' calls": "<|tool_call_end|>",
    "markers in strings": '<tool_call>{"',
    "held strings": '<tool_call>{"":"\\',
    "ends of values": "</parameter>\n",
    "ends of functions": "</function>\n",
    "white space": " ",
    "white space after an end": "</parameter>" + " " * 400_000,
    "line breaks": "\n<",
    "braces": "[",
    "lists": "[],",
    "numbers": "1,",
    "digits": "1",
    "escapes": "\\n",
    "quotes": '"',
    "control characters": "\n",
    "closers": "}",
    "markers of Python": "<|tool_call_start|>[f(",
    "calls of Python": ", function(parameter=[1, 'a value'])",
}
BEFORE = {
    "": "",
    "arguments": CALL,
    "an open list": CALL + "[",
    "an open string": CALL + '"',
    "arguments first": '<tool_call>{"arguments":{"a":[',
    "a call": CALL + "1}}",
    "a function": "<tool_call><function=f>",
    "a string": "<tool_call><function=f><parameter=a>",
    "a number": "<tool_call><function=f><parameter=b>",
    "a null": "<tool_call><function=f><parameter=c>",
    "a name": "<tool_call><function=",
    "a head": "<|tool_call_begin|>",
    "after a head": "<|tool_call_begin|>f:0<|tool_call_argument_begin|>",
    "a head's call": "<|tool_call_begin|>f:0<|tool_call_argument_begin|>{}",
    "a call of Python": "<|tool_call_start|>[f(a=1)",
    "a value of Python": "<|tool_call_start|>[f(a=",
    "a string of Python": "<|tool_call_start|>[f(a='",
}


def processor_seconds(text: str, format: ToolFormat, step: int) -> float:
    parser = OutputParser(THINK, False, format, TOOLS)
    begin = time.process_time()
    for at in range(0, len(text), step):
        parser.push(text[at : at + step])
    parser.finish()
    return time.process_time() - begin


@pytest.mark.soak
@pytest.mark.parametrize("step", [4096, 1_000_000])
@pytest.mark.parametrize("before", BEFORE)
def test_a_megabyte_of_hostile_text_takes_linear_time(before: str, step: int) -> None:
    for repeated, format in product(
        HOSTILE.values(), [TOOL_FORMATS[name] for name in ("hermes", "qwen3_coder", "kimi", "lfm2")]
    ):
        text = BEFORE[before] + repeated * (1_000_000 // len(repeated))
        assert processor_seconds(text, format, step) < 4


@pytest.mark.parametrize(
    "before, hostile, format, step",
    [
        ("", "markers in strings", "hermes", 1000),
        ("", "heads", "kimi", 1000),
        ("a head's call", "ends of heads' calls", "kimi", 1000),
        ("an open list", "lists", "hermes", 1000),
        ("a string", "ends of values", "qwen3_coder", 1000),
        # From here on, the parser holds back a long text; copying that text for each piece would take many seconds.
        ("", "white space", "hermes", 4),
        ("arguments first", "digits", "hermes", 4),
        ("a call", "closers", "hermes", 4),
        ("a string", "white space after an end", "qwen3_coder", 4),
        ("a number", "digits", "qwen3_coder", 4),
        ("a name", "digits", "qwen3_coder", 4),
        ("a head", "digits", "kimi", 4),
        ("after a head", "white space", "kimi", 4),
        ("a head's call", "closers", "kimi", 4),
        ("a call of Python", "calls of Python", "lfm2", 1000),
        ("", "markers of Python", "lfm2", 1000),
        ("a value of Python", "digits", "lfm2", 4),
    ],
)
def test_a_megabyte_takes_a_second_or_so(before: str, hostile: str, format: str, step: int) -> None:
    repeated = HOSTILE[hostile]
    text = BEFORE[before] + repeated * (1_000_000 // len(repeated))
    assert processor_seconds(text, TOOL_FORMATS[format], step) < 4
