"""Calls written as tags, as in Qwen3-Coder, Qwen3.5 and Nemotron 3."""

import json
import re
from typing import Any

import pytest
from hypothesis import given, strategies as st

from baton.models.text.formats.events import CallArguments, CallBegun, CallEnded, Content, OutputEvent
from baton.models.text.formats.parser import OutputParser
from baton.models.text.formats.qwen3_coder import QWEN3_CODER
from tests.models.text.formats.parsing import called, calls_of, check_every_split, parse
from tests.models.text.formats.test_json_scanner import VALUES

TOOLS: dict[str, dict[str, Any]] = {
    "edit": {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "line": {"type": "integer"},
            "edits": {"type": "array", "items": {"type": "object"}},
            "force": {"type": "boolean"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
    },
    "now": {},
}


def check(text: str, expected: list[OutputEvent]) -> None:
    check_every_split(text, expected, tool_format=QWEN3_CODER, tools=TOOLS)


def test_calls_between_text() -> None:
    check(
        "I will edit.\n\n<tool_call>\n<function=edit>\n<parameter=path>\nsrc/é.py\n</parameter>\n"
        '<parameter=edits>\n[{"old": "</function>", "new": "\\u00e9"}]\n</parameter>\n'
        "<parameter=line>\n42\n</parameter>\n<parameter=force>\nTrue\n</parameter>\n"
        "<parameter=note>\nnull\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>\nDone.",
        [
            Content("I will edit."),
            *called(
                0,
                "edit",
                '{"path": "src/é.py", "edits": [{"old": "</function>", "new": "\\u00e9"}], "line": 42, '
                '"force": true, "note": null}',
            ),
            *called(1, "now", "{}"),
            Content("\nDone."),
        ],
    )


def one(value: str, parameter: str = "path") -> str:
    return f"<tool_call>\n<function=edit>\n<parameter={parameter}>{value}</parameter>\n</function>\n</tool_call>"


def path(text: str, index: int = 0) -> list[OutputEvent]:
    return called(index, "edit", json.dumps({"path": text}, ensure_ascii=False))


@pytest.mark.parametrize(
    "value, shown",
    [
        ("\nx\n", "x"),
        ("x", "x"),
        (" x ", " x "),
        ("\n\n  x\n\n", "\n  x\n"),
        ("", ""),
        ("\n", ""),
        ("\n\n", ""),
        ("\nnull\n", "null"),
        ('\n"a\\b\t\n', '"a\\b\t'),
        ("\n<parameter=path>\n<tool_call>\n<function=edit>\n", "<parameter=path>\n<tool_call>\n<function=edit>"),
        ("\n</tool_call> </parameter> </tool> </function> \n", "</tool_call> </parameter> </tool> </function> "),
        ("\n</parameter>\n<parameter=>\n", "</parameter>\n<parameter=>"),
        ("\n</parameter> <\n", "</parameter> <"),
        ("\n\n</param\n\n</function>\n</tool>", "\n</param\n\n</function>\n</tool>"),
        ("\n<<</</parameter\n", "<<</</parameter"),
    ],
)
def test_contents_of_a_string(value: str, shown: str) -> None:
    check(one(value), path(shown))


@pytest.mark.parametrize(
    "text, expected",
    [
        # An end marker is missing, or the first marker is.
        ("<tool_call><function=edit><parameter=path>x</parameter></tool_call>.", [*path("x"), Content(".")]),
        ("<tool_call><function=edit><parameter=path>x\n</function></tool_call>.", [*path("x"), Content(".")]),
        ("<tool_call><function=edit><parameter=path>x</parameter></function>", path("x")),
        ("<tool_call><function=edit><parameter=path>x</parameter></function> .", [*path("x"), Content(" .")]),
        ("<tool_call><function=now></tool_call>\n", called(0, "now", "{}")),
        ("<function=edit>\n<parameter=path>\nx\n</parameter>\n</function>\n</tool_call>", path("x")),
        ("a <function=edit><parameter=path>x</parameter></function> b", [Content("a"), *path("x"), Content(" b")]),
        # Two functions in one call.
        (
            "<tool_call><function=now></function>\n<function=edit><parameter=path>x</parameter></function></tool_call>",
            [*called(0, "now", "{}"), *path("x", 1)],
        ),
        (
            "<tool_call><function=now></function> <function=\n</function></tool_call>",
            [*called(0, "now", "{}"), Content(" <function=\n</function></tool_call>")],
        ),
        # An unknown tool, and unknown parameters.
        (
            "<tool_call><function= new ><parameter=a>1</parameter><parameter=b>\n[1\n</parameter></tool_call>",
            called(0, "new", '{"a": 1, "b": "[1"}'),
        ),
        (
            '<tool_call><function=now><parameter=a"b>x</parameter></function></tool_call>',
            called(0, "now", '{"a\\"b": "x"}'),
        ),
    ],
)
def test_well_formed_and_lenient_calls(text: str, expected: list[OutputEvent]) -> None:
    check(text, expected)


@pytest.mark.parametrize(
    "inside",
    [
        "",
        "\n",
        "nothing",
        "<function=",
        "<function=edit",
        "<function=>\n</function>\n</tool_call>",
        "<function=\n>\n</function>\n</tool_call>",
        "<function=a\x00b>\n</function>\n</tool_call>",
        "<function=edit>",
        "<function=edit>\n",
        "<function=edit>\nx\n</function>\n</tool_call>",
        "<function=edit>\n<parameter=>\nx\n</parameter>",
        "<function=edit>\n<parameter=path\nx\n</parameter>",
        "<function=edit>\n<parameter=path",
        "function=edit>\n</function>\n</tool_call>",
        '{"name": "edit", "arguments": {}}\n</tool_call>',
    ],
)
@pytest.mark.parametrize("begin", ["<tool_call>", "<tool_call> \n "])
def test_broken_calls_are_text(begin: str, inside: str) -> None:
    text = f"a\n {begin}{inside}"
    check(text, [Content(text)])


def test_without_the_first_marker_it_must_be_a_tool() -> None:
    text = "Write <function=name></function> for it."
    check(text, [Content(text)])


@pytest.mark.parametrize(
    "text, arguments",
    [
        ("<parameter=path>\nx\ny", '{"path": "x\\ny'),
        ("<parameter=path>\nx\n", '{"path": "x\\n'),
        ("<parameter=path>\nx\n</parame", '{"path": "x\\n</parame'),
        ("<parameter=path>\nx\n</function>\n</tool", '{"path": "x\\n</function>\\n</tool'),
        ("<parameter=path>\nx\n</parameter>\n", '{"path": "x"'),
        ("<parameter=path>\nx\n</parameter>\n<parameter=line>", '{"path": "x", "line": "'),
        ("<parameter=line>\n4", '{"line": "4'),
        ("<parameter=line>\n4}", '{"line": "4}'),
        ("<parameter=note>\nnul", '{"note": "nul'),
        ("<parameter=note>", '{"note": '),
    ],
)
def test_a_truncated_call_keeps_what_was_emitted(text: str, arguments: str) -> None:
    check(f"<tool_call>\n<function=edit>\n{text}", called(0, "edit", arguments, whole=False))


def test_strings_are_emitted_while_they_are_generated() -> None:
    parser = OutputParser(tool_format=QWEN3_CODER, tools=TOOLS)
    assert parser.push("<tool_call>\n<function=edit>\n<param") == []
    assert parser.push("eter=path>\n") == [CallBegun(0, "edit"), CallArguments(0, '{"path": ')]
    assert parser.push("a\n") == [CallArguments(0, '"a')]
    assert parser.push("b <") == [CallArguments(0, "\\nb ")]
    assert parser.push("/p>\n") == [CallArguments(0, "</p>")]
    assert parser.push("</parameter>\n<parameter=li") == []
    assert parser.push("ne>\n1") == [CallArguments(0, '", "line": ')]
    assert parser.push("2\n</parameter>\n</fu") == []
    assert parser.push("nction>") == [CallArguments(0, "12}"), CallEnded(0, whole=True)]
    assert parser.push("\n</tool_call>\n") == []
    assert parser.finish() == []


def written(name: str, arguments: dict[str, Any]) -> str:
    shown = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{shown}</function>\n</tool_call>"


def whole_text_parse(text: str) -> list[tuple[str, dict[str, str]]]:
    """Return the calls of well-formed text, with their values as written."""
    calls = re.findall(r"<tool_call>\n<function=(.*?)>\n(.*?)</function>\n</tool_call>", text, re.DOTALL)
    parameter = re.compile(r"<parameter=(.*?)>\n(.*?)\n</parameter>", re.DOTALL)
    return [(name, dict(parameter.findall(inside))) for name, inside in calls]


NAMES = st.from_regex(r"[a-z_.-]{1,8}", fullmatch=True)
# Characters that cannot end a value for `whole_text_parse`.
STRINGS = st.text(st.sampled_from('a <>\n{"é=,\\'), max_size=12)


@given(
    calls=st.lists(st.tuples(NAMES, st.dictionaries(NAMES, STRINGS | VALUES.filter(bool), max_size=4)), max_size=4),
    data=st.data(),
)
def test_well_formed_calls_are_what_a_parse_of_the_whole_text_finds(
    calls: list[tuple[str, dict[str, Any]]], data: st.DataObject
) -> None:
    names = {bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", str: "string"}
    tools: dict[str, dict[str, Any]] = {
        name: {"properties": {key: {"type": names[type(value)]} for key, value in arguments.items()}}
        for name, arguments in calls
    }
    calls = [(name, arguments) for name, arguments in dict(calls).items() if arguments or not tools[name]["properties"]]
    text = "\n".join(written(name, arguments) for name, arguments in calls)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    found = [
        (name, json.loads(arguments)) for name, arguments, whole in calls_of(parse(pieces, QWEN3_CODER, tools)) if whole
    ]
    assert found == calls
    assert [
        (name, {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()})
        for name, arguments in found
    ] == whole_text_parse(text)
