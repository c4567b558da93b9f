"""A model that prefers white space wherever a grammar allows it: every call and every object ends."""

import json
import random
from collections.abc import Collection, Sequence
from typing import Any

import jsonschema
import pytest

from baton.models.text.formats.grammars import CallableTool, output_grammar
from baton.models.text.formats.picking import TOOL_FORMATS
from baton.models.text.formats.thinking import THINK
from baton.models.text.grammars import writing
from baton.models.text.grammars.compiling import Grammars
from baton.models.text.grammars.matcher import GrammarMatcher
from baton.models.text.grammars.matching import MOST_SPACES
from tests.models.text.formats.parsing import calls_of, content_of, parse
from tests.models.text.formats.test_grammars import ADDED, EOS, SECTION, grammar_of, tokenizer

SPACES = b" \t\n\r\v\f"
# The model's choices where any text may follow, but no more white space: ends of a string, a thought, a parameter.
ENDS = ('"', "</think>", ".\n</parameter>\n", "'")
ANY_TEXT = 100  # how many tokens are allowed at least where any text may follow
MOST_TOKENS = 4000
SIGNS: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "sign": {"enum": ["+", "-"]}},
    "required": ["x", "sign"],
    "additionalProperties": False,
}
NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "list": {"type": "array", "items": {"type": "number"}, "minItems": 2},
        "inner": {"type": "object", "properties": {"a": {"type": ["string", "null"]}}, "required": ["a"]},
        "either": {"anyOf": [{"type": "boolean"}, {"type": "string"}]},
    },
    "required": ["text", "list", "inner", "either"],
}
SCHEMAS = {"signs": SIGNS, "nested": NESTED, "nothing": {"type": "object", "properties": {}}, "anything": {}}


class WhiteSpaceLover:
    """A model that draws white space wherever it may. Elsewhere it draws what ends something, else anything."""

    def __init__(self, added: Collection[str], seed: int) -> None:
        self._tokenizer, self._rng = tokenizer(added), random.Random(seed)
        made = self._tokenizer
        self.spaces = frozenset(made.encode(SPACES.decode()).ids)
        markers = [text for text in ("</think>", "</tool_call>", SECTION[1]) if text in added]
        self._closing = [made.encode(text).ids[0] for text in (*markers, *"}]>/")]
        self._planned: list[int] = []
        self._planned_ends = 0

    def draw(self, allowed: Collection[int]) -> int:
        if self._planned and self._planned[0] in allowed:
            return self._planned.pop(0)
        self._planned = []
        if spaces := [id for id in allowed if id in self.spaces]:
            return self._rng.choice(spaces)
        if endings := [id for id in (EOS, *self._closing) if id in allowed and len(allowed) < ANY_TEXT]:
            return endings[0]
        if len(allowed) < ANY_TEXT:
            return self._rng.choice(sorted(allowed))
        self._planned = self._tokenizer.encode(ENDS[self._planned_ends % len(ENDS)]).ids
        self._planned_ends += 1
        return self.draw(allowed) if self._planned[0] in allowed else self._rng.choice(sorted(allowed))

    def output(self, grammar: str, most: int = MOST_TOKENS) -> list[int]:
        """Return the tokens of an output that follows the grammar. It must end within `most` tokens."""
        size = self._tokenizer.get_vocab_size()
        matcher = Grammars(self._tokenizer.to_str(), size, size, [EOS]).matcher(grammar)
        ids: list[int] = []
        while not matcher.is_complete():
            drawn = self.draw([*allowed_in(matcher), *([EOS] if matcher.accepts() else [])])
            if drawn == EOS:
                break
            matcher.consume(drawn)
            ids.append(drawn)
            assert len(ids) < most, self.text(ids)[-200:]
        return ids

    def text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def longest_space(self, ids: Sequence[int]) -> int:
        """Return the length of the longest white space, in tokens."""
        longest = current = 0
        for id in ids:
            current = current + 1 if id in self.spaces else 0
            longest = max(longest, current)
        return longest


def allowed_in(matcher: GrammarMatcher) -> list[int]:
    mask = matcher.mask()
    return [id for id in range(8 * len(mask)) if mask[id // 8] >> id % 8 & 1]


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("added", [ADDED, ()], ids=["tokens", "text"])
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_every_required_call_ends(name: str, added: Collection[str], parallel: bool, begun: bool) -> None:
    format = TOOL_FORMATS[name]
    for seed, (tool, schema) in enumerate(SCHEMAS.items()):
        lover = WhiteSpaceLover(added, seed)
        ids = lover.output(grammar_of(format, added, True, parallel, [CallableTool(tool, schema)], THINK, begun))
        events = parse([lover.text(ids)], format, {tool: schema}, THINK, begun)
        assert calls_of(events) and not content_of(events).strip()
        for called, arguments, whole in calls_of(events):
            assert called == tool and whole
            jsonschema.validate(json.loads(arguments), schema)
        assert lover.longest_space(ids) <= MOST_SPACES


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_white_space_around_a_call_is_what_templates_write(name: str) -> None:
    """Without thoughts and strings, every white space of the output is written by the format's template."""
    for seed in range(5):
        lover = WhiteSpaceLover(ADDED, seed)
        tool = CallableTool("add", SIGNS)
        ids = lover.output(grammar_of(TOOL_FORMATS[name], ADDED, tools=[tool], reasoning=None))
        assert lover.longest_space(ids) <= 2 and len(ids) < 120


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_call_in_place_of_an_answer_ends_and_so_does_the_answer(name: str) -> None:
    format, tool = TOOL_FORMATS[name], CallableTool("add", SIGNS)
    for seed in range(5):
        lover = WhiteSpaceLover(ADDED, seed)
        grammar = grammar_of(format, ADDED, False, True, [tool], THINK, answer=writing.json_schema(SIGNS))
        text = lover.text(lover.output(grammar))
        events = parse([text], format, {"add": SIGNS}, THINK)
        answers = [*(json.loads(arguments) for _, arguments, _ in calls_of(events))] or [json.loads(content_of(events))]
        for answer in answers:
            jsonschema.validate(answer, SIGNS)


@pytest.mark.parametrize("begun", [None, False, True], ids=["no thought", "may think", "thinks"])
@pytest.mark.parametrize("schema", [*SCHEMAS.values(), writing.ANY_OBJECT], ids=[*SCHEMAS, "any object"])
def test_every_object_ends(schema: dict[str, Any], begun: bool | None) -> None:
    for seed in range(3):
        lover = WhiteSpaceLover(ADDED, seed)
        answer = writing.json_schema({"type": "object", **schema})
        grammar = output_grammar(answer, None, ADDED, THINK, begun) if begun is not None else answer
        ids = lover.output(grammar)
        content = content_of(parse([lover.text(ids)], None, None, THINK if begun is not None else None, bool(begun)))
        jsonschema.validate(json.loads(content), schema)
        assert lover.longest_space(ids) <= MOST_SPACES


@pytest.mark.parametrize(
    "grammar",
    [
        writing.regex(r"\s*yes\s*"),
        writing.regex(r"(yes|\s)+"),
        writing.grammar('root ::= ws object ws\nobject ::= "{" ws "}"\nws ::= [ \\t\\n]*'),
        writing.grammar('start: WS? "yes" WS?\nWS: /[ \\t\\n]+/'),
        writing.grammar('start: %json {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'),
    ],
    ids=["regex", "regex of words", "gbnf", "lark", "json in lark"],
)
def test_white_space_in_a_row_is_limited_in_clients_own_grammars(grammar: str) -> None:
    for seed in range(3):
        lover = WhiteSpaceLover((), seed)
        ids = lover.output(grammar)
        assert ids and lover.longest_space(ids) <= MOST_SPACES


def test_white_space_that_nothing_else_can_replace_has_no_limit() -> None:
    lover = WhiteSpaceLover((), 0)
    ids = lover.output(writing.regex(f"a {{{MOST_SPACES + 10}}}b"))
    assert lover.text(ids) == "a" + " " * (MOST_SPACES + 10) + "b"
