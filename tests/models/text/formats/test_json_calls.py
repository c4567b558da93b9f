"""The formats with calls as JSON objects: Hermes', Granite's and Nemotron's."""

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from baton.models.text.formats.content import ToolFormat
from baton.models.text.formats.events import CallArguments, CallBegun, CallEnded, Content, OutputEvent
from baton.models.text.formats.hermes import GRANITE4, HERMES
from baton.models.text.formats.nemotron_v2 import NEMOTRON_V2
from baton.models.text.formats.parser import OutputParser
from tests.models.text.formats.parsing import called, calls_of, check_every_split, parse
from tests.models.text.formats.test_json_scanner import VALUES

FORMATS = [HERMES, GRANITE4, NEMOTRON_V2]


def test_calls_between_text() -> None:
    text = (
        "Let me see.\n"
        '<tool_call>\n{"name": "weather", "arguments": {"place": "Zürich", "days": 3}}\n</tool_call>\n'
        '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>\n\nThat is all. '
    )
    expected = [
        Content("Let me see."),
        *called(0, "weather", '{"place": "Zürich", "days": 3}'),
        *called(1, "time", "{}"),
        Content("\n\nThat is all. "),
    ]
    check_every_split(text, expected, tool_format=HERMES)
    check_every_split(text, expected, tool_format=GRANITE4)


def test_a_list_of_calls() -> None:
    text = (
        '<TOOLCALL>[{"name": "a", "arguments": {"x": [1]}}, '
        '{"name": "b", "arguments": {"y": "]</TOOLCALL>"}}]</TOOLCALL>\n'
    )
    expected = [*called(0, "a", '{"x": [1]}'), *called(1, "b", '{"y": "]</TOOLCALL>"}')]
    check_every_split(text, expected, tool_format=NEMOTRON_V2)


def hermes(inside: str) -> str:
    return f"<tool_call>\n{inside}\n</tool_call>"


F = called(0, "f", '{"a": 1}')


@pytest.mark.parametrize(
    "text, expected",
    [
        (hermes('{"name": "f", "arguments": {"a": 1}}'), F),
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', F),
        (hermes('{"id": [{"x": "}"}], "name": "f", "arguments": {"a": 1}, "type": "function"}'), F),
        (hermes('{"name": "f", "parameters": {"a": 1}}'), F),
        (hermes('{"name": "\\u0066", "arguments": {"a": 1}}'), F),
        (hermes('{"name": "f", "arguments": "{\\"a\\": 1}"}'), F),
        (hermes('{"name": "f", "arguments": {"a": 1}, "arguments": [2], "name": 5}'), F),
        (hermes('[{"name": "f", "arguments": {"a": 1}}]'), F),
        (hermes('{"name": "f"}'), called(0, "f", "{}")),
        (hermes('{"name": "f", "arguments": null}'), called(0, "f", "{}")),
        (hermes('{"name": "f", "arguments": ""}'), called(0, "f", "{}")),
        (hermes('{"name": "f", "arguments": {\n}}'), called(0, "f", "{\n}")),
        (
            hermes('{"name": "f", "arguments": {"a": "<tool_call>{\\"name\\"}</tool_call> \\\\"}}'),
            called(0, "f", '{"a": "<tool_call>{\\"name\\"}</tool_call> \\\\"}'),
        ),
        (
            hermes('{"name": "f", "arguments": {"a": "\\u00e9\\ud83d\\ude00\\ud800"}}'),
            called(0, "f", '{"a": "\\u00e9\\ud83d\\ude00\\ud800"}'),
        ),
        (hermes('{"name": "f", "arguments": {"a": "x\ny"}}'), called(0, "f", '{"a": "x\\ny"}')),
        (
            hermes('{"name": "f", "arguments": {"a": 1}}\n{"name": "g", "arguments": {}}'),
            [*F, *called(1, "g", "{}")],
        ),
        # Outputs with too few or too many braces, or with the last marker cut off or missing.
        (hermes('{"name": "f", "arguments": {"a": 1}'), F),
        (hermes('{"name": "f", "arguments": {"a": 1}}}'), F),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}', F),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}\n', F),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool', [*F, Content("</tool")]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}} so', [*F, Content(" so")]),
        (hermes('{"name": "f", "arguments": {"a": 1}}') + " < ", [*F, Content(" < ")]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1} so', [*F, Content(" so")]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}, "id" so', [*F, Content(', "id" so')]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}, {"name": 5', [*F, Content(', {"name": 5')]),
        (
            hermes('{"name": "f", "arguments": {"a": 1}}') + "<tool_call>" + hermes('{"name": "g"}'),
            [*F, Content("<tool_call>"), *called(1, "g", "{}")],
        ),
    ],
)
def test_well_formed_and_lenient_calls(text: str, expected: list[OutputEvent]) -> None:
    check_every_split(text, expected, tool_format=HERMES)


@pytest.mark.parametrize(
    "inside",
    [
        "",
        " ",
        "nothing",
        "{}",
        "[]",
        '"f"',
        '{"name": "f"',
        '{"name": "f", }',
        '{"name": "f" "arguments": {}}',
        "{'name': 'f', 'arguments': {}}",
        '{"name": "", "arguments": {}}',
        '{"name": " ", "arguments": {}}',
        '{"name": "a\\nb", "arguments": {}}',
        '{"name": "\\ud800", "arguments": {}}',
        '{"name": 5, "arguments": {}}',
        '{"name": null, "arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": 5}',
        '{"name": "f", "arguments": nul}',
        '{"name": "f", "arguments": "x"}',
        '{"name": "f", "arguments": "{"}',
        '{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}',
        '{"arguments": {}}',
        '{"arguments": {"a": 1}',
        '{"arguments": {"a": tru}, "name": "f"}',
        '{"function": {"name": "f", "arguments": {}}}',
    ],
)
@pytest.mark.parametrize("after", ["", "\n</tool_call>", " \n", " x\n"])
def test_broken_calls_are_text(inside: str, after: str) -> None:
    text = f" a \n\n<tool_call>\n{inside}{after}"
    check_every_split(text, [Content(text)], tool_format=HERMES)


def test_a_restarted_call_is_found() -> None:
    text = '<tool_call>{"name": "f<tool_call>\n{"name": "f", "arguments": {}}</tool_call>'
    check_every_split(text, [Content('<tool_call>{"name": "f'), *called(0, "f", "{}")], tool_format=HERMES)


@pytest.mark.parametrize(
    "shown, rest",
    [
        ('{"a": 1', ""),
        ('{"a": "x\\', ""),
        ('{"a": "\\u12', 'z"}}</tool_call>'),
        ('{"a": 1', " 2}}\n</tool_call>"),
        ('{"a": tru', 'x, "b": 1}}'),
        ('{"a": [1, 2', '}, "b": 1}}'),
        ('{"a"', ': "b": 1}'.replace(":", ";")),
        ("{", "'a': 1}}</tool_call>"),
    ],
)
def test_a_broken_call_keeps_what_was_emitted(shown: str, rest: str) -> None:
    shown = shown + " " if rest.startswith(" ") else shown
    rest = rest.lstrip(" ")
    expected: list[OutputEvent] = [CallBegun(0, "f"), CallArguments(0, shown), CallEnded(0, whole=False)]
    text = f'<tool_call>{{"name": "f", "arguments": {shown}{rest}'
    check_every_split(text, expected + ([Content(rest)] if rest else []), tool_format=HERMES)


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_arguments_are_emitted_while_they_are_generated(format: ToolFormat) -> None:
    parser = OutputParser(tool_format=format)
    assert parser.push(f'{format.begins[0]}{{"name": "f", "argum') == []
    assert parser.push('ents": {"a": "x') == [CallBegun(0, "f"), CallArguments(0, '{"a": "x')]
    assert parser.push("y\\") == [CallArguments(0, "y\\")]
    assert parser.push("n<") == [CallArguments(0, "n<")]
    assert parser.push('", "b": tr') == [CallArguments(0, '", "b": tr')]
    assert parser.push("ue}") == [CallArguments(0, "ue}"), CallEnded(0, whole=True)]
    assert parser.push(f"}}{format.end} ") == []
    assert parser.finish() == []


def test_deep_arguments_break() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 200
    events = parse([text], HERMES)
    assert calls_of(events) == [("f", '{"a": ' + "[" * 127, False)]
    assert events[-1] == Content("[" * 73)


CALLS = st.lists(
    st.tuples(st.from_regex(r"[a-z_.]{1,8}", fullmatch=True), st.dictionaries(st.text(max_size=6), VALUES, max_size=4)),
    min_size=1,
    max_size=4,
)
WORDS = st.text(st.sampled_from('ab <>\n/tol_c{"[é'), max_size=12).filter(lambda text: "<tool_call>" not in text)


def written(name: str, arguments: dict[str, Any], ascii: bool) -> str:
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=ascii)


def whole_text_parse(text: str, format: ToolFormat) -> list[tuple[str, Any]]:
    """Return the calls of well-formed text: the JSON after each marker."""
    found = []
    while format.begins[0] in text:
        text = text.partition(format.begins[0])[2].lstrip("\n")
        value, end = json.JSONDecoder().raw_decode(text)
        found += [(call["name"], call["arguments"]) for call in (value if isinstance(value, list) else [value])]
        text = text[end:].partition(format.end)[2]
    return found


@given(calls=CALLS, before=WORDS, after=WORDS, ascii=st.booleans(), data=st.data())
def test_well_formed_calls_are_what_a_parse_of_the_whole_text_finds(
    calls: list[tuple[str, dict[str, Any]]], before: str, after: str, ascii: bool, data: st.DataObject
) -> None:
    format = data.draw(st.sampled_from(FORMATS))
    shown = [written(name, arguments, ascii) for name, arguments in calls]
    if format is NEMOTRON_V2:
        text = f"{before}\n{format.begins[0]}[{', '.join(shown)}]{format.end}{after}"
    else:
        text = before + "".join(f"\n{format.begins[0]}\n{call}\n{format.end}" for call in shown) + after
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    events = parse(pieces, format)
    found = [(name, json.loads(arguments)) for name, arguments, whole in calls_of(events) if whole]
    assert found == calls == whole_text_parse(text, format)
    assert [event.text for event in events if isinstance(event, Content)] == [
        part for part in (before.rstrip(" \n"), after if after.strip(" \n") else "") if part
    ]
