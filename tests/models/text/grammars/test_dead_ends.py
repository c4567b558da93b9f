"""Grammars that an output cannot follow to its end: they are refused with the place, at once or when it is reached."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from baton.models.text.grammars import lark
from baton.models.text.grammars.errors import ForbiddenToken, GrammarError, TooManyItems
from baton.models.text.grammars.matcher import GrammarMatcher
from baton.models.text.grammars.schemas import dead_end_in, parts_of
from baton.models.text.grammars.writing import grammar, json_schema, regex
from baton.models.text.tokenizer import load_text

TEXT = load_text(Path(__file__).parents[4] / "models" / "bundled")
GRAMMARS = TEXT.grammars(TEXT.vocab_size)
ITSELF, STRING = {"$ref": "#"}, {"type": "string"}


def needs(name: str, schema: Any, **more: Any) -> dict[str, Any]:
    """Return the schema of an object that must have this property."""
    return {"type": "object", "properties": {name: schema}, "required": [name], **more}


def strings(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{index}": STRING for index in range(count)}}


def objects(count: int) -> dict[str, Any]:
    return {"anyOf": [needs(f"k{index}", STRING) for index in range(count)]}


NODE = needs("next", {"$ref": "#/$defs/node"})
ENDLESS: dict[str, tuple[dict[str, Any], str]] = {
    "the root alone": (ITSELF, "the whole schema (#) refers only to itself"),
    "a reference to a reference": (
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}}},
        "#/$defs/a refers only to itself",
    ),
    "a required property": (needs("a", ITSELF), "#/properties/a must contain the whole schema (#) again"),
    "a node": (needs("n", {"$ref": "#/$defs/node"}, **{"$defs": {"node": NODE}}), "#/$defs/node/properties/next"),
    "an optional property": (
        {"type": "object", "properties": {"n": {"$ref": "#/$defs/node"}}, "$defs": {"node": NODE}},
        "#/$defs/node/properties/next must contain #/$defs/node again",
    ),
    "two that need each other": (
        {**needs("l", {"$ref": "#/$defs/a"}), "$defs": {
            "a": needs("b", {"$ref": "#/$defs/b"}),
            "b": needs("a", {"$ref": "#/$defs/a"}),
        }},
        "#/$defs/b/properties/a must contain #/$defs/a again",
    ),
    "items": ({"type": "array", "items": ITSELF, "minItems": 1}, "#/items must contain the whole schema (#) again"),
    "first items": ({"type": "array", "prefixItems": [STRING, ITSELF], "minItems": 2}, "#/prefixItems/1"),
    "each alternative": (needs("a", {"anyOf": [ITSELF, needs("b", ITSELF)]}), "must contain"),
    "a name with a slash": (needs("a/b~", ITSELF), "#/properties/a~1b~0 must contain"),
    "an anchor": (needs("a", {"$ref": "#top"}, **{"$anchor": "top"}), "#/properties/a must contain"),
    "another property": (
        {"type": "object", "required": ["b"], "additionalProperties": ITSELF},
        "#/additionalProperties must contain",
    ),
}  # fmt: skip
FINITE: dict[str, dict[str, Any]] = {
    "an optional child": {"type": "object", "properties": {"a": ITSELF}},
    "a nullable child": needs("a", {"anyOf": [ITSELF, {"type": "null"}]}),
    "a list of children": needs("a", {"type": "array", "items": ITSELF}),
    "an object or null": {**needs("a", ITSELF), "type": ["object", "null"]},
    "a property named $ref": needs("$ref", STRING),
    "an unused definition": {"type": "integer", "$defs": {"node": NODE}},
    "a tree": {**needs("v", {"type": "integer"}), "properties": {"v": {"type": "integer"}, "l": ITSELF, "r": ITSELF}},
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_schema_that_no_json_follows_is_refused_with_its_path(name: str) -> None:
    schema, place = ENDLESS[name]
    with pytest.raises(GrammarError) as caught:
        GRAMMARS.compile(json_schema(schema))
    assert place in str(caught.value)


@pytest.mark.parametrize("name", FINITE)
def test_a_schema_that_may_contain_itself_is_taken(name: str) -> None:
    assert dead_end_in(parts_of(FINITE[name])) == ""
    GRAMMARS.compile(json_schema(FINITE[name]))


@pytest.mark.parametrize(
    "value",
    [
        {"type": 5, "properties": 3, "required": "a", "anyOf": {}, "items": [], "minItems": "x", "$ref": 4},
        {"type": ["object", None], "properties": {"a": 1}, "required": [["a"]], "prefixItems": {"a": 1}},
        {"$ref": "#/a/b/0", "a": {"b": []}},
        {"$ref": "#/%zz"},
        {"$anchor": 5, "minItems": True, "type": "array", "items": False},
    ],
)
def test_schemas_of_any_shape_are_analysed(value: dict[str, Any]) -> None:
    assert dead_end_in(parts_of(value)) == ""


WIDE: dict[str, tuple[dict[str, Any], str]] = {
    "optional properties": (strings(251), "the whole schema (#) has 251 optional properties"),
    "alternatives": (objects(1001), "the whole schema (#) has 1001 alternatives"),
    "below": (needs("x", objects(1001)), "#/properties/x has 1001 alternatives"),
    "in a definition": (
        {"type": "object", "properties": {"x": {"$ref": "#/$defs/big"}}, "$defs": {"big": strings(300)}},
        "#/$defs/big has 300 optional properties",
    ),
    "in sum": ({"type": "array", "items": {"anyOf": [strings(60)] * 6}}, "#/items has 6 alternatives"),
}


@pytest.mark.parametrize("name", WIDE)
def test_a_schema_that_is_too_wide_at_one_place_is_refused_with_its_path(name: str) -> None:
    schema, place = WIDE[name]
    with pytest.raises(GrammarError) as caught:
        GRAMMARS.compile(json_schema(schema))
    assert place in str(caught.value) and "more continuations" in str(caught.value)


@pytest.mark.parametrize("schema", [strings(240), {"anyOf": [{"const": f"k{i}"} for i in range(2000)]}, objects(300)])
def test_a_schema_that_is_almost_too_wide_can_be_followed(schema: dict[str, Any]) -> None:
    matcher = GRAMMARS.matcher(json_schema(schema))
    for token in TEXT.encode('"k' if "const" in str(schema) else '{"', add_special_tokens=False):
        matcher.consume(token)
        assert any(matcher.mask())


RULES: dict[str, tuple[str, str]] = {
    "needs itself": ('start: "x" a\na: "y" a', "rule 'a' never ends: each of its alternatives contains 'a' again"),
    "in one alternative": ('start: "x" (a | "z")\na: "y" a', "rule 'a' never ends"),
    "that is optional": ('start: "x" ("b" a "c")*\na: "y" a', "rule 'a' never ends"),
    "a circle": ('start: a\na: b\nb: "x" (a | b)\n', "rule 'a' never ends: it always needs 'b', which leads to 'a'"),
    "repeated": ('start: a{1,3} "x"\na: b a\nb: "x"', "rule 'a' never ends"),
    "of gbnf": ('root ::= "Hi " name-x\nname-x ::= "x" name-x', "rule 'name_x' never ends"),
    "an empty class": ('start: "x" word\nword: /a[^\\s\\S]/ "y"', "/a[^\\s\\S]/ in rule 'word' matches no text"),
    "a schema": (f"start: %json {json.dumps(needs('a', ITSELF))}", "#/properties/a must contain"),
}


@pytest.mark.parametrize("name", RULES)
def test_a_grammar_with_a_rule_that_produces_nothing_is_refused_with_its_name(name: str) -> None:
    text, place = RULES[name]
    with pytest.raises(GrammarError) as caught:
        GRAMMARS.compile(grammar(text))
    assert place in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        'start: a\na: "y" a\n | "z"',
        'start: "x" a?\na: "y" a?',
        'start: a{0,3} "x"\na: "b"',
        'start: [a] "x"\na: "y" [a]',
        'start: x y\n\n?x: "a" // a comment\ny: "c" %json {"type":\n "integer"}\n',
        'start: a\na: "b" | ("c" a "/") | /d[)]/\n\nunused: unused',
        'root ::= "Hi " name (ws "a")?\nname ::= [A-Z] [a-z]+ | "x" name\nws ::= | [ \\t\\n] ws',
        "%import common.INT\nstart: INT",
        'start: "a"i "b".."c" A~2\nA: "x" B?\nB: /b/i\n',
    ],
)
def test_a_grammar_whose_rules_end_is_taken(text: str) -> None:
    GRAMMARS.compile(grammar(text))
    assert lark.dead_end_in(lark.contents_of(grammar(text))) == ""


def test_syntax_that_is_not_read_is_not_refused() -> None:
    with pytest.raises(lark.UnknownSyntax):
        lark.contents_of("start: x::1")
    GRAMMARS.compile("start: A\nA: /a/ & /[ab]/\n%ignore / /")


@pytest.mark.parametrize("pattern", [r"a[^\s\S]b", "[^\\s\\S]", "^(.{1,1000}){1,1000}$"])
def test_a_regex_that_cannot_be_followed_is_refused(pattern: str) -> None:
    with pytest.raises(GrammarError, match=r"matches no text|regular expressions are too complex"):
        GRAMMARS.compile(regex(pattern))


def follow(matcher: GrammarMatcher, text: str) -> None:
    for token in TEXT.encode(text, add_special_tokens=False):
        matcher.mask()
        matcher.consume(token)


LATE = "[a-z]{120}(.{1,1000}){1,1000}"


def test_a_dead_end_that_shows_late_says_after_what() -> None:
    matcher = GRAMMARS.matcher(regex(LATE))
    with pytest.raises(GrammarError, match=r"after '[a-z]{20}.*its regular expressions are too complex") as caught:
        follow(matcher, "a" * 200)
    assert not isinstance(caught.value, ForbiddenToken)


def test_an_output_that_fails_spoils_no_later_one() -> None:
    """Outputs of one grammar share what the lexer has found, which has a limit."""
    for _ in range(2):
        first = GRAMMARS.compile(regex(LATE)).matcher()
        with pytest.raises(GrammarError, match="after 'aaaa"):
            follow(first, "a" * 200)
    follow(GRAMMARS.compile(regex(LATE)).matcher(), "a" * 100)


def test_a_place_with_too_many_alternatives_harms_only_outputs_that_come_there() -> None:
    rules = [f'r{index}: "k{index}" r{index}?' for index in range(1100)]
    choice = " | ".join(f"r{index}" for index in range(1100))
    text = grammar("\n".join([f'start: /[0-9]{{2}}/ ("no" | ":" (":" ({choice}) | "x"))', *rules]))
    grammars = TEXT.grammars(TEXT.vocab_size)
    compiled = grammars.compile(text)
    with pytest.raises(TooManyItems, match=r"after .00:.*more continuations"):
        follow(compiled.matcher(), "00::k")
    assert grammars.compile(text) is compiled
    follow(compiled.matcher(), "00:x")


def test_long_strings_of_limited_length_can_be_written() -> None:
    matcher = GRAMMARS.matcher(json_schema(needs("body", {"type": "string", "maxLength": 8000})))
    follow(matcher, json.dumps({"body": "An ünlimited text, 4 times. " * 250}, ensure_ascii=False))
    assert matcher.accepts()


def test_a_token_outside_the_mask_is_an_error_of_another_kind() -> None:
    with pytest.raises(ForbiddenToken):
        GRAMMARS.matcher(regex("ab")).consume(ord("b"))


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/d0", "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)}},
        {"type": "object", "properties": {f"d{i}": {"$ref": f"#/properties/d{(i - 7) % 3000}"} for i in range(3000)}},
        {"anyOf": [{"anyOf": [{"$ref": f"#/anyOf/{(i + j) % 3000}"} for j in range(3)]} for i in range(3000)]},
        needs("a", ITSELF, required=[f"p{i}" for i in range(5000)]),
    ],
    ids=["chain", "circles", "alternatives", "required"],
)
def test_large_schemas_are_analysed_soon(schema: dict[str, Any]) -> None:
    before = time.thread_time()
    dead_end_in(parts_of(schema))
    assert time.thread_time() - before < 3, "on a busy machine; alone it takes half a second"
