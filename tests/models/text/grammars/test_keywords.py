"""JSON Schema's keywords, in the order of its test suite: the outputs that each allows, and the refused keywords."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from baton.models.text.grammars.errors import GrammarError
from baton.models.text.grammars.writing import json_schema
from baton.models.text.tokenizer import load_text

TEXT = load_text(Path(__file__).parents[4] / "models" / "bundled")
GRAMMARS = TEXT.grammars(TEXT.vocab_size)
INTEGER, STRING, ARRAY, OBJECT = ({"type": kind} for kind in ("integer", "string", "array", "object"))
# For each keyword a schema, valid values and invalid values. Properties have the schema's order, as in every output.
HELD: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "additionalProperties": (
        {**OBJECT, "properties": {"a": INTEGER}, "additionalProperties": {"type": "boolean"}},
        [{}, {"a": 1, "b": True}, {"b": False}],
        [{"a": "x"}, {"b": 1}],
    ),
    "allOf": ({"allOf": [{**INTEGER, "minimum": 3}, {"maximum": 9}]}, [3, 9], [2, 10]),
    "anchor": ({"$ref": "#x", "$defs": {"a": {"$anchor": "x", **INTEGER}}}, [1], ["a"]),
    "anyOf": ({"anyOf": [INTEGER, {**STRING, "maxLength": 2}]}, [1, "ab"], ["abc", None]),
    "boolean_schema": ({**OBJECT, "properties": {"a": True, "b": False}}, [{"a": [1]}, {}], [{"b": 1}]),
    "const": ({"const": {"a": [1, None]}}, [{"a": [1, None]}], [{"a": [1]}, 1]),
    "content": ({**STRING, "contentMediaType": "application/json"}, ["a"], [1]),
    "default": ({**INTEGER, "default": 4}, [1], ["a"]),
    "definitions": ({"definitions": {"n": INTEGER}, "$ref": "#/definitions/n"}, [1], ["a"]),
    "defs": ({"$defs": {"n": INTEGER}, **ARRAY, "items": {"$ref": "#/$defs/n"}}, [[1, 2]], [["a"]]),
    "enum": ({"enum": [6, "foo", [], True, None, {"a": 1}]}, [6, "foo", [], True, None, {"a": 1}], [4, False]),
    "exclusiveMaximum": ({"type": "number", "exclusiveMaximum": 3}, [2.9, -5], [3, 3.1]),
    "exclusiveMinimum": ({"type": "number", "exclusiveMinimum": 1.5}, [1.6, 20], [1.5, 1]),
    "items": ({**ARRAY, "items": INTEGER}, [[], [1, 2]], [["a"], {}]),
    "maxItems": ({**ARRAY, "maxItems": 2}, [[], [1, "a"]], [[1, 2, 3]]),
    "maxLength": ({**STRING, "maxLength": 2}, ["", "ü😀"], ["abc"]),
    "maxProperties": ({**OBJECT, "maxProperties": 1}, [{}, {"a": 1}], [{"a": 1, "b": 2}]),
    "maximum": ({**INTEGER, "maximum": 30}, [30, -1], [31]),
    "minItems": ({**ARRAY, "minItems": 1}, [[1]], [[]]),
    "minLength": ({**STRING, "minLength": 2}, ["ab", "abc"], ["a"]),
    "minProperties": ({**OBJECT, "minProperties": 1}, [{"a": 1}], [{}]),
    "minimum": ({"type": "number", "minimum": 1.25}, [1.25, 99], [1.2, -2]),
    "multipleOf": ({**INTEGER, "multipleOf": 7}, [0, 49], [50]),
    "multipleOf a part": ({"type": "number", "multipleOf": 0.5}, [0.5, 1.5], [0.7]),
    "oneOf": ({"oneOf": [INTEGER, STRING]}, [1, "a"], [None]),
    "pattern": ({**STRING, "pattern": "^a*$"}, ["aaa", ""], ["b"]),
    "pattern anywhere": ({**STRING, "pattern": "b+"}, ["abc"], ["ac"]),
    "patternProperties": (
        {**OBJECT, "patternProperties": {"^f": INTEGER}, "additionalProperties": False},
        [{"f": 1, "fx": 2}],
        [{"fx": "a"}, {"g": 1}],
    ),
    "prefixItems": (
        {**ARRAY, "prefixItems": [INTEGER, STRING], "items": False},
        [[], [1], [1, "a"]],
        [["a"], [1, "a", 2]],
    ),
    "properties": (
        {**OBJECT, "properties": {"foo": INTEGER, "bar": STRING}},
        [{"foo": 1, "bar": "b"}, {}, {"x": [1]}],
        [{"foo": 1, "bar": {}}],
    ),
    "ref to the root": (
        {**OBJECT, "properties": {"a": {"$ref": "#"}}, "additionalProperties": False},
        [{"a": {"a": {}}}],
        [{"a": {"b": 1}}],
    ),
    "required": ({**OBJECT, "properties": {"a": {}, "b": {}}, "required": ["b"]}, [{"b": 1}, {"a": 1, "b": 2}], [{}]),
    "type": ({"type": ["integer", "null"]}, [1, -20, None], ["a", 1.5]),
    "type of any number": ({"type": "number"}, [1, 1.5, -1e30], ["1"]),
    "unknownKeyword": ({"x-thing": 1, "title": "a", "description": "b", "examples": ["c"], **INTEGER}, [1], ["a"]),
}
FORMATS = {
    "date": ("2020-02-28", "2020-13-01"),
    "time": ("10:20:30Z", "a"),
    "date-time": ("2020-02-28T10:20:30Z", "2020-02-28"),
    "duration": ("P1D", "1D"),
    "email": ("a@b.cd", "a"),
    "hostname": ("a.example.com", "-a-"),
    "ipv4": ("1.2.3.4", "256.1.1.1"),
    "ipv6": ("::1", "z"),
    "uuid": ("2eb8aa08-aa98-11ea-b4aa-73b441d16380", "2eb8"),
    "uri": ("http://a.b/c", "a b"),
}
REFUSED: dict[str, dict[str, Any]] = {
    "contains": {**ARRAY, "contains": INTEGER},
    "dependentRequired": {**OBJECT, "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {**OBJECT, "dependentSchemas": {"a": {"required": ["b"]}}},
    "$dynamicRef": {"$dynamicRef": "#x", "$defs": {"a": {"$dynamicAnchor": "x"}}},
    "if": {"if": INTEGER, "then": {"minimum": 1}, "else": STRING},
    "maxContains": {**ARRAY, "contains": {"const": 1}, "maxContains": 1},
    "not": {"not": INTEGER},
    "propertyNames": {**OBJECT, "propertyNames": {"maxLength": 1}},
    "localhost": {"$ref": "http://localhost:1234/integer.json"},
    "unevaluatedItems": {**ARRAY, "prefixItems": [INTEGER], "unevaluatedItems": False},
    "unevaluatedProperties": {**OBJECT, "unevaluatedProperties": False},
    "uniqueItems": {**ARRAY, "uniqueItems": True},
    "Unknown format": {**STRING, "format": "iri"},
}


def follows(schema: dict[str, Any], value: Any) -> bool:
    """Return whether the schema's grammar accepts the value as a complete output."""
    matcher = GRAMMARS.matcher(json_schema(schema))
    try:
        for token in TEXT.encode(json.dumps(value, ensure_ascii=False), add_special_tokens=False):
            matcher.consume(token)
        return matcher.accepts()
    except GrammarError:
        return False


@pytest.mark.parametrize("name", HELD)
def test_outputs_follow_the_keyword(name: str) -> None:
    schema, right, wrong = HELD[name]
    validator = jsonschema.Draft202012Validator(schema)
    for values, is_right in ((right, True), (wrong, False)):
        assert [validator.is_valid(value) for value in values] == [is_right] * len(values)
        assert [follows(schema, value) for value in values] == [is_right] * len(values)


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_enforced(name: str) -> None:
    right, wrong = FORMATS[name]
    schema = {**STRING, "format": name}
    assert (follows(schema, right), follows(schema, wrong)) == (True, False)


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_keywords_are_refused_by_name(name: str) -> None:
    with pytest.raises(GrammarError) as caught:
        GRAMMARS.matcher(json_schema(REFUSED[name]))
    assert name in str(caught.value)


def test_one_of_allows_several_alternatives_to_match() -> None:
    """oneOf is enforced like anyOf; no other keyword differs from JSON Schema."""
    schema = {"oneOf": [INTEGER, {"minimum": 2}]}
    assert not jsonschema.Draft202012Validator(schema).is_valid(3) and follows(schema, 3)
