"""Tool calls whose ids contain the function's name, as Kimi K2 and Kimi Linear write them."""

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from baton.models.text.formats.events import CallArguments, CallBegun, CallEnded, Content, OutputEvent, Reasoning
from baton.models.text.formats.kimi import KIMI
from baton.models.text.formats.parser import OutputParser
from baton.models.text.formats.thinking import THINK
from tests.models.text.formats.parsing import called, calls_of, check_every_split, parse
from tests.models.text.formats.test_json_calls import CALLS, WORDS

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, BETWEEN, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


def one(head: str, arguments: str = '{"a": 1}') -> str:
    return f"{CALL}{head}{BETWEEN}{arguments}{CALL_END}"


def section(*calls: str) -> str:
    return BEGIN + "".join(calls) + END


F, G = called(0, "f", '{"a": 1}'), called(1, "g", "{}")


@pytest.mark.parametrize(
    "text, expected",
    [
        (section(one("functions.f:0")), F),
        (section(one("functions.f:0"), one("functions.g:1", "{}")), [*F, *G]),
        ("I look.\n" + section(one("functions.f:3")) + "\n", [Content("I look."), *F]),
        (section(one("functions.f:0")) + "\n\nSo.", [*F, Content("\n\nSo.")]),
        (section(one("functions.f:0")) + section(one("functions.g:1", "{}")), [*F, *G]),
        # Calls with incomplete ids, and with white space.
        (section(one("f:0")), F),
        (section(one("f")), F),
        (section(one("functions.f")), F),
        (section(one(" functions.f:0 ")), F),
        (section(one("\nfunctions.f : 12\n", ' \n{"a": 1}\n')), F),
        (section("\n", one("functions.f:0"), "\n", one("functions.g:1", "{}"), "\n"), [*F, *G]),
        (section(one("functions.a.b-c:0")), called(0, "a.b-c", '{"a": 1}')),
        (section(one("functions.functions.f:0")), called(0, "functions.f", '{"a": 1}')),
        (section(one("functions.f:x")), called(0, "f:x", '{"a": 1}')),
        # Arguments that stand for an object without being one, and unusual contents of an object.
        (section(one("f:0", "")), called(0, "f", "{}")),
        (section(one("f:0", " ")), called(0, "f", "{}")),
        (section(one("f:0", "null")), called(0, "f", "{}")),
        (section(one("f:0", '"{\\"a\\": 1}"')), F),
        (section(one("f:0", '{"a": "x\ny"}')), called(0, "f", '{"a": "x\\ny"}')),
        (section(one("f:0", json.dumps({"a": CALL_END + END}))), called(0, "f", json.dumps({"a": CALL_END + END}))),
        # Outputs with too few or too many markers, or with an unusual end.
        (one("f:0"), F),
        (one("f:0") + one("g:1", "{}") + END, [*F, *G]),
        (one("f:0") + " so", [*F, Content(" so")]),
        (BEGIN + one("f:0"), F),
        (BEGIN + one("f:0").removesuffix(CALL_END), F),
        (section(one("f:0").removesuffix(CALL_END)), F),
        (section(one("f:0").removesuffix(CALL_END), one("g:1", "{}")), [*F, *G]),
        (section(one("f:0"), CALL_END), F),
        (section(one("f:0", '{"a": 1}}')), F),
        (BEGIN + one("f:0") + "\n", F),
        (BEGIN + one("f:0") + "<|tool_call", [*F, Content("<|tool_call")]),
        (section(one("f:0")) + END, [*F, Content(END)]),
        (section(one("f:0"), CALL + "g"), [*F, Content(CALL + "g" + END)]),
        (BEGIN + " " + section(one("f:0")), [Content(BEGIN), *F]),
        (CALL + section(one("f:0")), [Content(CALL), *F]),
    ],
)
def test_well_formed_and_lenient_calls(text: str, expected: list[OutputEvent]) -> None:
    check_every_split(text, expected, tool_format=KIMI)


@pytest.mark.parametrize(
    "inside",
    [
        "",
        "nothing",
        CALL,
        CALL + "f:0",
        CALL + 'f:0{"a": 1}' + CALL_END,
        CALL + "f:0" + CALL_END,
        CALL + "f:0<|tool_call_argument",
        one(""),
        one(" \n"),
        one(":0"),
        one("functions."),
        one("functions.:0"),
        one("a\nb:0"),
        one("a<b:0"),
        one("a\x07:0"),
        BETWEEN + "{}" + CALL_END,
    ],
)
@pytest.mark.parametrize("after", ["", END, " x\n"])
def test_calls_without_a_name_are_text(inside: str, after: str) -> None:
    text = f" a \n\n{BEGIN}{inside}{after}"
    check_every_split(text, [Content(text)], tool_format=KIMI)


@pytest.mark.parametrize(
    "shown, rest",
    [
        ('{"a": 1', ""),
        ('{"a": "x\\', ""),
        ('{"a": 1', "]" + CALL_END + END),
        ('{"a": ', CALL_END + END),
        ("{", "'a': 1}" + CALL_END),
        ("", ""),
        ("", "x" + CALL_END),
        ("", " [1]" + CALL_END),
        ("", '"x"' + CALL_END),
        ("", '"{' + CALL_END),
        ("", "nul" + CALL_END),
        ("", "<|tool_call_en"),
        ("", END),
    ],
)
def test_a_broken_call_keeps_what_was_emitted(shown: str, rest: str) -> None:
    arguments = [CallArguments(0, shown)] if shown else []
    expected: list[OutputEvent] = [CallBegun(0, "f"), *arguments, CallEnded(0, whole=False)]
    text = f"{BEGIN}{CALL}functions.f:0{BETWEEN}{shown}{rest}"
    check_every_split(text, expected + ([Content(rest)] if rest else []), tool_format=KIMI)


def test_a_call_after_a_broken_one_is_found() -> None:
    text = section(one("f:0", "x"), one("g:1", "{}"))
    expected = [CallBegun(0, "f"), CallEnded(0, whole=False), Content("x" + CALL_END), *G]
    check_every_split(text, expected, tool_format=KIMI)


def test_names_are_emitted_after_their_ids_and_arguments_while_they_are_generated() -> None:
    parser = OutputParser(tool_format=KIMI)
    assert parser.push(f"Hm. {BEGIN}{CALL}functions.f:0<|tool_call_argument") == [Content("Hm.")]
    assert parser.push("_begin|>") == [CallBegun(0, "f")]
    assert parser.push('{"a": "x') == [CallArguments(0, '{"a": "x')]
    assert parser.push("<|tool_call_end|>\\") == [CallArguments(0, "<|tool_call_end|>\\")]
    assert parser.push('n"}') == [CallArguments(0, 'n"}'), CallEnded(0, whole=True)]
    assert parser.push(f"{CALL_END}{CALL}g{BETWEEN}") == [CallBegun(1, "g")]
    assert parser.push(f"{{}}{CALL_END}{END} ") == [CallArguments(1, "{}"), CallEnded(1, whole=True)]
    assert parser.finish() == []


def test_a_section_ends_unclosed_reasoning() -> None:
    for text in (f"Hm.\n{BEGIN}{one('f:0')}{END}", f"Hm.\n</think>{BEGIN}{one('f:0')}{END}"):
        check_every_split(text, [Reasoning("Hm."), *F], reasoning=THINK, begun=True, tool_format=KIMI)


@given(calls=CALLS, before=WORDS, after=WORDS, ascii=st.booleans(), first=st.integers(0, 300), data=st.data())
def test_well_formed_calls_are_found(
    calls: list[tuple[str, dict[str, Any]]], before: str, after: str, ascii: bool, first: int, data: st.DataObject
) -> None:
    heads = [f"functions.{name}:{index}" for index, (name, _) in enumerate(calls, first)]
    arguments_of = [json.dumps(arguments, ensure_ascii=ascii) for _, arguments in calls]
    text = before + section(*map(one, heads, arguments_of)) + after
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    events = parse([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)], KIMI)
    assert [(name, json.loads(arguments)) for name, arguments, whole in calls_of(events) if whole] == calls
    assert [event.text for event in events if isinstance(event, Content)] == [
        part for part in (before.rstrip(" \n"), after if after.strip(" \n") else "") if part
    ]


def message(*calls: tuple[str, str]) -> dict[str, Any]:
    shown = [{"id": id, "type": "function", "function": {"name": name, "arguments": {}}} for id, name in calls]
    return {"role": "assistant", "content": "", "tool_calls": shown}


def result(id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": "done"}


def named(name: str) -> dict[str, Any]:
    return {"role": "tool", "name": name, "content": "done"}


USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    "chat, expected",
    [
        ([USER, {"role": "assistant", "content": "Hello."}], [USER, {"role": "assistant", "content": "Hello."}]),
        (
            [message(("call_x", "f"), ("call_y", "g")), result("call_y"), result("call_x"), USER, message(("z", "f"))],
            [
                message(("functions.f:0", "f"), ("functions.g:1", "g")),
                result("functions.g:1"),
                result("functions.f:0"),
                USER,
                message(("functions.f:2", "f")),
            ],
        ),
        # Ids of the model itself, ids that restart in each answer, and the id of a call that is not in the chat.
        (
            [message(("functions.f:0", "f")), result("functions.f:0"), message(("functions.g:1", "g"))],
            [message(("functions.f:0", "f")), result("functions.f:0"), message(("functions.g:1", "g"))],
        ),
        (
            [message(("1", "f")), result("1"), message(("1", "g")), result("1")],
            [
                message(("functions.f:0", "f")),
                result("functions.f:0"),
                message(("functions.g:1", "g")),
                result("functions.g:1"),
            ],
        ),
        ([result("gone"), message(("1", "f"))], [result("gone"), message(("functions.f:0", "f"))]),
        # Results that name only their tool: the last call of that tool, and a tool that was not called.
        (
            [message(("1", "f")), result("1"), message(("2", "f")), named("f"), named("g")],
            [
                message(("functions.f:0", "f")),
                result("functions.f:0"),
                message(("functions.f:1", "f")),
                result("functions.f:1") | {"name": "f"},
                result("g") | {"name": "g"},
            ],
        ),
    ],
)
def test_ids_count_the_calls_of_a_chat(chat: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    before = json.dumps(chat)
    assert KIMI.own_ids(chat) == expected
    assert json.dumps(chat) == before
