"""Grammars over the bundled model's tokens: the outputs that they allow, and the refusal of costly grammars."""

import gc
import json
import math
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from baton.models.text.grammars import compiling
from baton.models.text.grammars.compiling import Grammars
from baton.models.text.grammars.errors import GrammarError
from baton.models.text.grammars.matcher import GrammarMatcher
from baton.models.text.grammars.writing import choice, grammar, json_schema, regex
from baton.models.text.tokenizer import load_text

BUNDLED = load_text(Path(__file__).parents[4] / "models" / "bundled")
VOCABULARY = 800
GRAMMARS = BUNDLED.grammars(VOCABULARY)
INTEGERS = {"type": "array", "items": {"type": "integer"}}


def allowed(matcher: GrammarMatcher) -> list[int]:
    words = int.from_bytes(matcher.mask(), "little")
    return [token for token in range(8 * len(matcher.mask())) if words >> token & 1]


def fed(written: str, text: str) -> GrammarMatcher:
    matcher = GRAMMARS.matcher(written)
    for token in BUNDLED.encode(text, add_special_tokens=False):
        matcher.consume(token)
    return matcher


def follows(written: str, text: str) -> bool:
    """Return whether the grammar allows the text as a whole output."""
    try:
        return fed(written, text).accepts()
    except GrammarError:
        return False


def test_a_mask_has_a_bit_for_each_token_that_may_follow_and_none_for_an_end() -> None:
    matcher = fed(regex("ab?"), "a")
    assert allowed(matcher) == BUNDLED.encode("b", add_special_tokens=False)
    assert len(matcher.mask()) == 4 * math.ceil(VOCABULARY / 32)
    assert matcher.accepts() and not matcher.is_complete()
    matcher.consume(allowed(matcher)[0])
    assert matcher.accepts() and matcher.is_complete() and not any(matcher.mask())


def test_ids_that_the_tokenizer_lacks_are_never_allowed() -> None:
    assert max(allowed(GRAMMARS.matcher(regex("(?s:.*)")))) < BUNDLED.vocab_size < VOCABULARY


def test_a_model_with_fewer_logits_than_the_tokenizer_has_tokens() -> None:
    few = BUNDLED.grammars(40)
    matcher = few.matcher(regex("[!a]"))
    assert len(matcher.mask()) == 8 and allowed(matcher) == [ord("!")]


def test_a_token_that_does_not_follow_is_an_error_that_stays() -> None:
    matcher = GRAMMARS.matcher(choice(["yes"]))
    with pytest.raises(GrammarError, match="doesn't satisfy"):
        matcher.consume(ord("n"))
    with pytest.raises(GrammarError):
        matcher.consume(ord("y"))


def test_copies_are_independent() -> None:
    first, second = GRAMMARS.matcher(regex("ab")), GRAMMARS.matcher(regex("ab"))
    first.consume(ord("a"))
    assert allowed(first) == [ord("b")] and allowed(second) == [ord("a")]


def test_a_grammar_is_compiled_once_and_while_it_is_held() -> None:
    grammars = BUNDLED.grammars(VOCABULARY)
    held = grammars.compile(regex("a"))
    assert grammars.compile(regex("a")) is held is grammars.known(regex("a"))
    assert grammars.known(regex("b")) is None


def test_the_cache_keeps_the_latest_within_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "KEPT_BYTES", 3 * compiling.bytes_of(regex("a")) + 1)
    grammars = BUNDLED.grammars(VOCABULARY)
    held = grammars.compile(regex("0"))
    for letter in "12345":
        grammars.compile(regex(letter))
    gc.collect()
    known = [letter for letter in "012345" if grammars.known(regex(letter)) is not None]
    assert known == ["0", "3", "4", "5"] and held is not None


def test_threads_that_compile_the_same_get_the_same() -> None:
    grammars, found = BUNDLED.grammars(VOCABULARY), list[Any]()
    threads = [threading.Thread(target=lambda: found.append(grammars.compile(json_schema(INTEGERS)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and all(each is found[0] for each in found)


HOSTILE = {
    "repeated a million times": json_schema({"type": "string", "pattern": "^(a{1000}){1000}$"}),
    "optional properties": json_schema({"properties": {f"p{i}": {"type": "string"} for i in range(20_000)}}),
    "alternatives of alternatives": json_schema(
        {"allOf": [{"anyOf": [{"properties": {f"{i}.{j}": {}}} for j in range(4)]} for i in range(8)]}
    ),
    "refers to itself alone": json_schema({"$ref": "#"}),
    "multiples": json_schema({"type": "integer", "multipleOf": 999983}),
    "several multiples": json_schema({"anyOf": [{"type": "integer", "multipleOf": i} for i in range(90, 99)]}),
    "multiples by another name": r'start: %json {"type": "integer", "\u006dultipleOf": 999983}',
    "multiples without end": 'start: %json {"type": "integer", "multipleOf": 7777e99999999999999999999}',
    "nested": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000,
    "long": 'start: "' + "a" * 600_000 + '"',
    "without a token": json_schema({"enum": []}),
    "of the wrong type": json_schema({"properties": 5}),
    "of no type": json_schema({"type": "objekt"}),
    "points nowhere": json_schema({"$ref": "#/nowhere"}),
    "points elsewhere": json_schema({"$ref": "http://localhost:1/schema.json"}),
    "no pattern": json_schema({"type": "string", "pattern": "("}),
    "no regex": regex("(a"),
    "looks around": regex("a(?=b)"),
    "no grammar": 'start: "a" missing',
}


@pytest.mark.parametrize("written", HOSTILE.values(), ids=HOSTILE)
def test_costly_grammars_are_refused_soon(written: str) -> None:
    before = time.thread_time()
    with pytest.raises(GrammarError, match=r"[a-z]"):
        GRAMMARS.compile(written)
    assert time.thread_time() - before < 3, "on a busy machine; alone it takes less than one"


def test_deep_schemas_are_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(10_000):
        deep = {"items": deep}
    with pytest.raises(GrammarError):
        json_schema(deep)


def test_an_output_that_takes_too_long_fails() -> None:
    """The cost of an ambiguous grammar grows with the length of the output."""
    ambiguous = fed('start: a\na: a a | "x" | ""', "")
    with pytest.raises(GrammarError, match=r"too complex|items"):
        for _ in range(3000):
            ambiguous.mask()
            ambiguous.consume(ord("x"))


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ('{"a":[1,2]}', True),
        (json.dumps({"a": [1, {"b": None}]}, indent=4), True),
        ('{ "a" : 1 }', True),
        ('{  "a":1}', False),
        ('{"a":1', False),
        ("[1]", False),
    ],
)
def test_any_object(text: str, right: bool) -> None:
    assert follows(json_schema({"type": "object"}), text) == right


def test_a_schema_as_an_object_or_as_its_text() -> None:
    assert json_schema(json.dumps(INTEGERS)) == json_schema(INTEGERS)
    assert follows(json_schema(INTEGERS), "[1, 23]") and not follows(json_schema(INTEGERS), '["1"]')
    for wrong in ("[1]", "{", "5"):
        with pytest.raises(GrammarError, match="schema"):
            json_schema(wrong)


def test_unsupported_keywords_are_an_error_only_if_strict() -> None:
    unique = {"type": "array", "uniqueItems": True}
    with pytest.raises(GrammarError, match="uniqueItems"):
        GRAMMARS.compile(json_schema(unique))
    assert follows(json_schema(unique, strict=False), "[1, 1]")


@pytest.mark.parametrize(
    ("pattern", "text", "right"),
    [
        ("^ab$", "ab", True),
        (r"a\$", "a$", True),
        (r"a\\$", "a\\", True),
        (r"\d{3}-\d", "123-4", True),
        ("a/b", "a/b", True),
        ("(?i)yes", "YES", True),
        ("ä+", "ää", True),
        ("ab", "abc", False),
    ],
)
def test_regexes(pattern: str, text: str, right: bool) -> None:
    assert follows(regex(pattern), text) == right


def test_choices_are_as_they_are_written() -> None:
    texts = ['no "quotes"', "ä\n", "a\\b", "日本", "a|b", "", "/x/"]
    assert all(follows(choice(texts), text) for text in texts) and not follows(choice(texts), "a")
    with pytest.raises(GrammarError, match="nothing to choose"):
        choice([])


@pytest.mark.parametrize(
    "text", ['root ::= "Hi " name\nname ::= [A-Z] [a-z]+', 'start: "Hi " NAME\nNAME: /[A-Z][a-z]+/']
)
def test_a_grammar_in_lark_or_gbnf(text: str) -> None:
    assert follows(grammar(text), "Hi Bob") and not follows(grammar(text), "Hi bob")


def test_the_error_for_neither_says_where() -> None:
    with pytest.raises(GrammarError, match="line 1"):
        grammar("root ::= (")
    with pytest.raises(GrammarError, match="at most"):
        regex("a" * 100_000)


def test_a_tokenizer_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(ValueError):
        Grammars("{}", 1, 1, [])
