import pytest
from hypothesis import example, given, strategies as st

from baton.models.text.formats.events import Content, OutputEvent, Reasoning
from baton.models.text.formats.hermes import HERMES
from baton.models.text.formats.parser import OutputParser
from baton.models.text.formats.qwen3_coder import QWEN3_CODER
from baton.models.text.formats.thinking import THINK
from tests.models.text.formats.parsing import called, check_every_split, parse


@pytest.mark.parametrize(
    "text, expected",
    [
        ("<think>\nHm.\n\nSo.\n</think>\n\nYes.\n", [Reasoning("Hm.\n\nSo."), Content("Yes.\n")]),
        (" \n<think>Hm.</think>Yes.", [Reasoning("Hm."), Content("Yes.")]),
        ("<think>\n\n</think>\n\n  Yes.", [Content("  Yes.")]),
        ("<think></think>", []),
        ("<think>\nHm. </thin </think </ <think> ", [Reasoning("Hm. </thin </think </ <think> ")]),
        ("<think>\nHm.\n</thi", [Reasoning("Hm.\n</thi")]),
        ("<think>\nHm.\n\n", [Reasoning("Hm.\n\n")]),
        (
            "<think>Hm.</think>Yes.</think> <think>No.</think>",
            [Reasoning("Hm."), Content("Yes.</think> <think>No.</think>")],
        ),
        ("Yes. <think>Hm.</think>", [Content("Yes. <think>Hm.</think>")]),
        ("\n Yes.\n", [Content("\n Yes.\n")]),
        ("Hm.</think>Yes.", [Content("Hm.</think>Yes.")]),
        ("<thin", [Content("<thin")]),
        (" <", [Content(" <")]),
        (" ", [Content(" ")]),
        ("", []),
    ],
)
def test_reasoning_that_the_output_begins(text: str, expected: list[OutputEvent]) -> None:
    check_every_split(text, expected, reasoning=THINK)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("Hm.\n</think>\n\nYes.", [Reasoning("Hm."), Content("Yes.")]),
        ("\n\nHm.\n</think>\n\nYes.", [Reasoning("Hm."), Content("Yes.")]),
        ("\n<think>\nHm.\n</think>\n\nYes.", [Reasoning("Hm."), Content("Yes.")]),
        (" Hm.", [Reasoning(" Hm.")]),
        ("</think>\n\nYes.", [Content("Yes.")]),
        ("</think>", []),
        ("", []),
    ],
)
def test_reasoning_that_the_prompt_began(text: str, expected: list[OutputEvent]) -> None:
    check_every_split(text, expected, reasoning=THINK, begun=True)


def test_calls_are_found_after_reasoning() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    text = f"{call}</think>\n\n{call}"
    check_every_split(text, [Reasoning(call), *called(0, "f", "{}")], reasoning=THINK, begun=True, tool_format=HERMES)


CALL = "<tool_call>\n<function=f>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    "text, expected",
    [
        (f"Hm.\n\n{CALL}\n", [Reasoning("Hm."), *called(0, "f", "{}")]),
        (f"{CALL}</think>", [*called(0, "f", "{}"), Content("</think>")]),
        (f"<tool_call> is\n</think>{CALL}", [Reasoning("<tool_call> is"), *called(0, "f", "{}")]),
        ("Hm. <tool_call>\n<functi", [Reasoning("Hm. <tool_call>\n<functi")]),
        ("Hm. <tool_call>\n<function=", [Reasoning("Hm. "), Content("<tool_call>\n<function=")]),
    ],
)
def test_a_call_ends_unclosed_reasoning(text: str, expected: list[OutputEvent]) -> None:
    check_every_split(text, expected, reasoning=THINK, begun=True, tool_format=QWEN3_CODER)


@pytest.mark.parametrize(
    "prompt, begun",
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("Assistant\n<think>\n\n", True),
        ("assistant<think>", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("Assistant\n<think></think>", False),
        ("What is <think>?<|im_end|>\n<|im_start|>assistant\n", False),
        ("", False),
    ],
)
def test_the_prompt_may_open_the_reasoning(prompt: str, begun: bool) -> None:
    assert THINK.begun_by(prompt) is begun


def test_only_beginnings_of_markers_are_held_back() -> None:
    parser = OutputParser(THINK, begun=True)
    assert parser.push("Hm") == [Reasoning("Hm")]
    assert parser.push("\n\n") == []
    assert parser.push("m </") == [Reasoning("\n\nm ")]
    assert parser.push("so") == [Reasoning("</so")]
    assert parser.push("\n</think>\n") == []
    assert parser.push("\nYes \n") == [Content("Yes \n")]


def definition(text: str, begun: bool) -> list[OutputEvent]:
    """Split a whole text into reasoning and content: the definition that the parser must match."""
    if text.lstrip(" \n").startswith("<think>"):
        text = text.partition("<think>")[2]
    elif not begun:
        return [Content(text)] if text else []
    thought, end, answer = text.partition("</think>")
    thought = thought.strip("\n") if end else thought.lstrip("\n")
    answer = answer.lstrip("\n")
    return [*([Reasoning(thought)] if thought else []), *([Content(answer)] if answer else [])]


@given(
    pieces=st.lists(st.sampled_from(["<think>", "</think>", "<thi", "nk>", "</", "\n", " ", "a", "<"]), max_size=12),
    begun=st.booleans(),
)
@example(pieces=["<thi", "nk>", "\n", "a"], begun=False)
def test_any_split_equals_the_definition(pieces: list[str], begun: bool) -> None:
    expected = definition("".join(pieces), begun)
    assert parse(pieces, reasoning=THINK, begun=begun) == expected
    assert parse(list("".join(pieces)), reasoning=THINK, begun=begun) == expected
