"""Tool calls in Python, as LFM2 writes them."""

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from baton.models.text.formats.events import CallArguments, CallBegun, CallEnded, Content, OutputEvent, Reasoning
from baton.models.text.formats.grammars import CallableTool
from baton.models.text.formats.lfm2 import LFM2
from baton.models.text.formats.parser import OutputParser
from baton.models.text.formats.thinking import THINK
from tests.models.text.formats.parsing import called, calls_of, check_every_split, content_of, parse
from tests.models.text.formats.test_grammars import ADDED, accepted, grammar_of
from tests.models.text.formats.test_json_calls import CALLS, WORDS

BEGIN, END = "<|tool_call_start|>", "<|tool_call_end|>"
F, G = called(0, "f", '{"a": 1}'), called(1, "g", "{}")


def listed(*calls: str) -> str:
    return f"{BEGIN}[{', '.join(calls)}]{END}"


def of_value(value: str) -> list[OutputEvent]:
    return called(0, "f", f'{{"a": {value}}}')


@pytest.mark.parametrize(
    "text, expected",
    [
        (listed("f(a=1)"), F),
        (listed("f(a=1)", "g()"), [*F, *G]),
        (listed("f(a=1)") + "Checking.", [*F, Content("Checking.")]),
        ("I look.\n" + listed("f(a=1)") + "\n", [Content("I look."), *F]),
        (listed("f(a=1)") + listed("g()"), [*F, *G]),
        (
            listed('get_status(id="12345", limit=2, deep=True)'),
            called(0, "get_status", '{"id": "12345", "limit": 2, "deep": true}'),
        ),
        # White space, names with other letters, and trailing commas.
        (f"{BEGIN}\n[ f ( a = 1 ) ,\n g( ) ]\n{END}", [*F, *G]),
        (listed("f(a=1,)"), F),
        (listed("a.b-c(é-1=1)"), called(0, "a.b-c", '{"é-1": 1}')),
        (listed("f(user name =1)"), called(0, "f", '{"user name": 1}')),
        # Outputs with too few markers or brackets.
        (f"{BEGIN}f(a=1){END}", F),
        (f"{BEGIN}f(a=1), g(){END}", [*F, *G]),
        (f"{BEGIN}[f(a=1){END}", F),
        (f"{BEGIN}[f(a=1)", F),
        (f"{BEGIN}[f(a=1)]", F),
        (f"{BEGIN}[f(a=1)] So.", [*F, Content(" So.")]),
        (f"{BEGIN}[f(a=1)], g()", [*F, Content(", g()")]),
        (f"{BEGIN}[f(a=1), 2]{END}", [*F, Content(f", 2]{END}")]),
        (f"{BEGIN}[{BEGIN}[f(a=1)]{END}", [Content(f"{BEGIN}["), *F]),
        # JSON instead of Python.
        (f'{BEGIN}[{{"name": "f", "arguments": {{"a": 1}}}}, {{"name": "g"}}]{END}.', [*F, *G, Content(".")]),
        (f'{BEGIN}{{"name": "f", "arguments": {{"a": 1}}}}{END}', F),
    ],
)
def test_well_formed_and_lenient_calls(text: str, expected: list[OutputEvent]) -> None:
    check_every_split(text, expected, tool_format=LFM2)


@pytest.mark.parametrize(
    "python, value",
    [
        *(("True", "true"), ("False", "false"), ("None", "null"), ("true", "true"), ("null", "null")),
        *(("-12", "-12"), ("1.50", "1.50"), ("2e-3", "2e-3"), ("+5", "5"), (".5", "0.5"), ("1.", "1.0"), ("007", "7")),
        *(("1_000", "1000"), ("9" * 30, "9" * 30), ("-0", "-0")),
        *(('""', '""'), ("''", '""'), ("'it\"s'", '"it\\"s"'), ('"it\'s"', '"it\'s"'), ("'a\nb'", '"a\\nb"')),
        (r"'\n\t\\\'\"\r'", r'"\n\t\\' + "'" + r'\"\r"'),
        (r"'\x41\u00e9\ud83d\ude00\U0001F600\a\0'", r'"Aé\ud83d\ude00😀\u0007\u0000"'),
        # Escapes that Python does not have stand for themselves, and so do incomplete ones.
        (r"'\d\xg\u12\U00110000\/'", r'"\\d\\xg\\u12\\U00110000/"'),
        ("'a\\\nb'", '"ab"'),
        (f"'{END})]'", f'"{END})]"'),
        *(("[]", "[]"), ("[1,'a', [True ,]]", '[1, "a", [true]]'), ("{}", "{}")),
        ('{\'é\': None, "b": {"c": [{}]},}', '{"é": null, "b": {"c": [{}]}}'),
        ("[" * 127 + "]" * 127, "[" * 127 + "]" * 127),
    ],
)
def test_values_of_python_become_json(python: str, value: str) -> None:
    json.loads(value)
    check_every_split(listed(f"f(a={python})"), of_value(value), tool_format=LFM2)
    assert parse([listed(f"f(a= {python} , b=1)")], LFM2) == called(0, "f", f'{{"a": {value}, "b": 1}}')


@pytest.mark.parametrize(
    "inside",
    [
        *("", "[", "[]", "nothing", "[f", "f(", "[f(1)]", "[f(a)]", "[f(a 1)]", "[(a=1)]", "[f(=1)]", "[f(a\x07=1)]"),
        *("[[f()]", "['f'(a=1)]", "[f(**{})]", "[f[a=1]]", "[call f(a=1)]", "[\x07()]", '[{"name": 1}]', "[{f}]"),
    ],
)
@pytest.mark.parametrize("after", ["", END, " x\n"])
def test_calls_without_a_name_are_text(inside: str, after: str) -> None:
    text = f" a \n\n{BEGIN}{inside}{after}"
    check_every_split(text, [Content(text)], tool_format=LFM2)


@pytest.mark.parametrize(
    "python, shown, rest",
    [
        ("1", '{"a": 1', ""),
        ("1]", '{"a": 1', "]"),
        ("1 b=2)", '{"a": 1', " b=2)"),
        ("1, b)", '{"a": 1', ", b)"),
        ("", '{"a": ', ""),
        (")", '{"a": ', ")"),
        ("x)", '{"a": ', "x)"),
        ("nan)", '{"a": ', "nan)"),
        ("1e999_9)", '{"a": ', "1e999_9)"),
        ("1" * 400 + "_" * 2, '{"a": ', "1" * 400 + "__"),
        ("'x", '{"a": "x', ""),
        ("'x' 'y')", '{"a": "x"', " 'y')"),
        ("'x\\", '{"a": "x', "\\"),
        ("(1, 2))", '{"a": ', "(1, 2))"),
        ("[1, x])", '{"a": [1, ', "x])"),
        ("[1 2])", '{"a": [1', " 2])"),
        ("{1: 2})", '{"a": {', "1: 2})"),
        ("{'b'})", '{"a": {"b"', "})"),
        ("[" * 128 + "1", '{"a": ' + "[" * 127, "[1"),
        ("f(b=1))", '{"a": ', "f(b=1))"),
    ],
)
def test_a_broken_call_keeps_what_was_emitted(python: str, shown: str, rest: str) -> None:
    expected: list[OutputEvent] = [CallBegun(0, "f"), CallArguments(0, shown), CallEnded(0, whole=False)]
    check_every_split(f"{BEGIN}[f(a={python}", expected + ([Content(rest)] if rest else []), tool_format=LFM2)


def test_a_call_after_a_broken_one_is_found() -> None:
    text = f"{BEGIN}[f(a=x)]{END}{listed('g()')}"
    expected = [*called(0, "f", '{"a": ', whole=False), Content(f"x)]{END}"), *G]
    check_every_split(text, expected, tool_format=LFM2)


def test_arguments_are_emitted_while_they_are_generated() -> None:
    parser = OutputParser(tool_format=LFM2)
    assert parser.push(f"Hm. {BEGIN}[f(a") == [Content("Hm.")]
    assert parser.push("='x") == [CallBegun(0, "f"), CallArguments(0, '{"a": "x')]
    assert parser.push(f"{END}\\") == [CallArguments(0, END)]
    assert parser.push("n', b=1") == [CallArguments(0, '\\n", "b": ')]
    assert parser.push("2)") == [CallArguments(0, "12}"), CallEnded(0, whole=True)]
    assert parser.push(f", g()]{END} ") == [CallBegun(1, "g"), CallArguments(1, "{}"), CallEnded(1, whole=True)]
    assert parser.finish() == []


def test_calls_end_unclosed_reasoning() -> None:
    for text in (f"Hm.\n{listed('f(a=1)')}", f"Hm.\n</think>{listed('f(a=1)')}"):
        check_every_split(text, [Reasoning("Hm."), *F], reasoning=THINK, begun=True, tool_format=LFM2)


@given(calls=CALLS, before=WORDS, after=WORDS, python=st.booleans(), data=st.data())
def test_well_formed_calls_are_found(
    calls: list[tuple[str, dict[str, Any]]], before: str, after: str, python: bool, data: st.DataObject
) -> None:
    """Values as Python's repr writes them, and as JSON."""
    calls = [(name, {f"k{n}": value for n, value in enumerate(values.values())}) for name, values in calls]
    shown = repr if python else json.dumps
    heads = [f"{name}({', '.join(f'{key}={shown(value)}' for key, value in values.items())})" for name, values in calls]
    text = before + listed(*heads) + after
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    events = parse([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)], LFM2)
    assert [(name, json.loads(arguments)) for name, arguments, whole in calls_of(events) if whole] == calls
    assert content_of(events) == before.rstrip(" \n") + (after if after.strip(" \n") else "")


@pytest.mark.parametrize("added", [ADDED, ()], ids=["tokens", "text"])
@pytest.mark.parametrize(
    "text, fits",
    [
        (listed('pick(of="a", n=3)'), True),
        (listed('pick(of="a", n=3)', "now()"), True),
        (listed('pick(n=3, of="a")'), False),
        (listed('pick(of="c", n=3)'), False),
        (listed('pick(of="a", n=30)'), False),
        (listed('pick(of="a")'), False),
        (listed("now(a=1)"), False),
        (listed("other()"), False),
        (listed('edit(path="a", text=\'it\\\'s\\n"b"\', lines=[1, 2], force=True, note={"a": null})'), True),
        (listed('edit(path="a", text="b", note={})'), True),
        (listed('edit(path="a", text="b", force=true)'), False),
        (listed("pick(of='a', n=3)"), False),
        (listed('edit(text="b", path="a")'), False),
        (listed('edit(path="a",text="b")'), False),
        (listed(), False),
    ],
)
def test_forced_calls_follow_their_schema(text: str, fits: bool, added: tuple[str, ...]) -> None:
    for required in (True, False):
        assert accepted(grammar_of(LFM2, added, required, reasoning=None), added, text) == fits


@pytest.mark.parametrize("called", ["f()", "f(a=1)", "f(b=None)", "f(a=1, c=2)", "f(b=2, c=3)", "f(a=1, b=null, c=3)"])
def test_parameters_that_are_not_required_may_be_left_out(called: str) -> None:
    """Every choice of parameters has its commas, and none is accepted with a comma too many."""
    number, maybe = {"type": "integer"}, {"type": ["integer", "null"]}
    grammar = grammar_of(LFM2, (), tools=[CallableTool("f", {"properties": {"a": number, "b": maybe, "c": number}})])
    assert accepted(grammar, (), listed(called))
    for wrong in (called.replace("(", "(, "), called.replace(")", ", )")):
        assert not accepted(grammar, (), listed(wrong))


def test_a_tool_without_a_schema_takes_any_parameters() -> None:
    grammar = grammar_of(LFM2, ADDED, tools=[CallableTool("any", {})])
    for text in (listed("any()"), listed('any(é=[1], b="x")')):
        assert accepted(grammar, ADDED, text)
    assert not accepted(grammar, ADDED, listed("any(1)"))
