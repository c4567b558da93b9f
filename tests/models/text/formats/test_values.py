import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from baton.models.text.formats.values import converted, quoted, types_of, value_of

LOOP: dict[str, Any] = {"anyOf": [{"type": "integer"}]}
LOOP["anyOf"].append(LOOP)
DEEP: dict[str, Any] = {"type": "boolean"}
for _ in range(5000):
    DEEP = {"anyOf": [DEEP]}


@pytest.mark.parametrize(
    "schema, types",
    [
        ({"type": "string"}, "string"),
        ({"type": ["string", "null"]}, "string null"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "integer null"),
        ({"oneOf": [{"type": "number"}, {"anyOf": [{"type": "array"}]}]}, "number array"),
        ({"allOf": [{"$ref": "#/$defs/Unit"}], "default": "C"}, "string"),
        ({"$ref": "#/$defs/a~1b"}, "object"),
        ({"$ref": "#/$defs/nothing/here"}, ""),
        ({"$ref": "#/$defs/itself"}, ""),
        ({"$ref": "https://example.org/schema"}, ""),
        ({"enum": ["a", 1, None, 1.5, True]}, "string integer null number boolean"),
        ({"const": {"a": 1}}, "object"),
        ({"type": "string", "enum": [1]}, "string"),
        ({"type": "dict"}, "object"),
        ({"type": ["float", "bool", {}, 3]}, "number boolean"),
        ({"type": "whatever"}, ""),
        ({}, ""),
        (True, ""),
        (LOOP, "integer"),
        (DEEP, "boolean"),
    ],
)
def test_types_of_a_parameter(schema: Any, types: str) -> None:
    tool = {
        "properties": {"x": schema},
        "$defs": {"Unit": {"enum": ["C", "F"]}, "a/b": {"type": "object"}, "itself": {"$ref": "#/$defs/itself"}},
    }
    assert types_of("x", tool) == frozenset(types.split())


def test_parameters_that_a_schema_does_not_name() -> None:
    assert types_of("x", {}) == frozenset()
    assert types_of("x", {"properties": {"y": {"type": "string"}}}) == frozenset()
    assert types_of("x", {"properties": [], "additionalProperties": {"type": "integer"}}) == {"integer"}
    assert types_of("x", {"additionalProperties": False}) == frozenset()


@pytest.mark.parametrize(
    "types, text, value",
    [
        ("integer", "5", "5"),
        ("integer", " -12345678901234567890 ", "-12345678901234567890"),
        ("integer", "five", '"five"'),
        ("integer", "5.5", "5.5"),
        ("number", "1e3", "1e3"),
        ("number", "NaN", '"NaN"'),
        ("boolean", "true", "true"),
        ("boolean", "False", "false"),
        ("boolean", "yes", '"yes"'),
        ("null", "None", "null"),
        ("integer", "none", "null"),
        ("object", '{"a": [1, "b"]}', '{"a": [1, "b"]}'),
        ("object", "{'a': 1}", "\"{'a': 1}\""),
        ("array", "[1,\n 2]", "[1,\n 2]"),
        ("array", '["a\nb"]', '["a\\nb"]'),
        ("array", "[" * 1000, f'"{"[" * 1000}"'),
        ("string integer", "5", "5"),
        ("string number", "5", "5"),
        ("string number", "1.5", "1.5"),
        ("string integer", "1.5", '"1.5"'),
        ("string integer", "five", '"five"'),
        ("string boolean", "True", "true"),
        ("string object", '"{}"', r'"\"{}\""'),
        ("string object null", "null", "null"),
        ("", "5", "5"),
        ("", '"five"', '"five"'),
        ("", "five\n", r'"five\n"'),
        ("", "True", '"True"'),
        ("", "", '""'),
    ],
)
def test_text_is_converted_by_type(types: str, text: str, value: str) -> None:
    assert converted(text, frozenset(types.split())) == value


@pytest.mark.parametrize(
    "types, pieces, shown",
    [
        ("string", ["a", 'b"'], ['"a', 'b\\"', '"']),
        ("string", ["null"], ['"null', '"']),
        ("string", [""], ['"', '"']),
        ("string", ["", "a"], ['"', "a", '"']),
        ("string null", ["nu", "ll"], ["", "", "null"]),
        ("string null", ["Non", "e"], ["", "", "null"]),
        ("string null", ["nu", "t", "s"], ["", '"nut', "s", '"']),
        ("string null", ["null", " "], ["", '"null ', '"']),
        ("string null", ["nul"], ["", '"nul"']),
        ("string null", [""], ["", '""']),
        ("integer", ["1", "2"], ["", "", "12"]),
    ],
)
def test_strings_are_shown_while_they_are_generated(types: str, pieces: list[str], shown: list[str]) -> None:
    """`shown` has the text that is shown after each piece, and at the end."""
    found: list[str] = []
    value = value_of(frozenset(types.split()), lambda text: found.append(found.pop() + text))
    for piece in pieces:
        found.append("")
        value.add(piece)
    found.append("")
    value.end()
    assert found == shown


@given(st.lists(st.text(), max_size=5))
def test_text_is_quoted_piece_by_piece(pieces: list[str]) -> None:
    assert json.loads('"' + "".join(map(quoted, pieces)) + '"') == "".join(pieces)
