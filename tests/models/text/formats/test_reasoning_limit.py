"""Grammars that limit the tokens of reasoning."""

import pytest

from baton.models.text.formats.grammars import ReasoningLimit, WantedCalls, output_grammar
from baton.models.text.formats.hermes import HERMES
from baton.models.text.formats.thinking import THINK
from tests.models.text.formats.test_grammars import ADDED, TOOLS, accepted, tokenizer

BEGIN = tokenizer(ADDED).token_to_id(THINK.begin)


def limited(tokens: int, begun: bool, answer: str | None = None, calls: WantedCalls | None = None) -> str:
    return output_grammar(answer, calls, ADDED, THINK, begun, ReasoningLimit(tokens, BEGIN))


@pytest.mark.parametrize(
    ("text", "begun", "fits"),
    [
        ("abc</think>Yes.", True, True),
        ("abcd</think>Yes.", True, False),  # Each letter is a token.
        ("</think>", True, True),
        ("<think>abc</think>Yes.", False, True),
        ("<think>abcd</think>Yes.", False, False),
        ("Yes, without a thought.", False, True),
        ("Yes. <think>", False, False),  # A thought begins only an output.
        ("a</think>b</think><think>c", True, True),  # Anything may follow.
        ("a</think><tool_call>b", True, True),
        ("a<tool_call>b", True, False),
    ],
)
def test_a_thought_has_at_most_its_tokens(text: str, begun: bool, fits: bool) -> None:
    assert accepted(limited(3, begun), ADDED, text) == fits


def test_a_limit_of_none_leaves_no_thought() -> None:
    assert accepted(limited(0, True), ADDED, "</think>Yes.")
    assert not accepted(limited(0, True), ADDED, "a</think>Yes.")
    assert accepted(limited(0, False), ADDED, "<think></think>Yes.")


@pytest.mark.parametrize("begun", [False, True])
def test_an_answer_and_calls_come_after_a_limited_thought(begun: bool) -> None:
    opening = "" if begun else "<think>"
    answer = limited(3, begun, 'start: "Yes" | "No"')
    assert accepted(answer, ADDED, f"{opening}abc</think>Yes")
    assert not accepted(answer, ADDED, f"{opening}abcd</think>Yes")
    assert not accepted(answer, ADDED, f"{opening}abc</think>Maybe")
    calls = WantedCalls(TOOLS, HERMES.begins[0], HERMES.rules, ADDED, required=False)
    assert accepted(limited(3, begun, calls=calls), ADDED, f"{opening}abc</think>Well.")
    assert not accepted(limited(3, begun, calls=calls), ADDED, f"{opening}abcd</think>Well.")


def test_markers_that_are_no_tokens_are_not_limited() -> None:
    grammar = output_grammar('start: "Yes"', None, (), THINK, True, ReasoningLimit(3, 0))
    assert accepted(grammar, (), "abcdef</think>Yes")
