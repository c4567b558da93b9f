"""Conversion to JSON of parameter values that a model writes as plain text, guided by the tool's schema."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from baton.models.text.formats.json_scanner import as_json

Tools = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each tool's parameters, which form an object, by the tool's name."""

_TYPES = {
    **{name: name for name in ("string", "integer", "number", "boolean", "object", "array", "null")},
    # Type names of programming languages, which occur in generated schemas.
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "dict": "object",
    "list": "array",
}
_PYTHON_TYPES = {bool: "boolean", str: "string", int: "integer", float: "number", dict: "object", list: "array"}
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
_NULLS = ("null", "None")


def types_of(parameter: str, schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the JSON types that a tool's schema allows for a parameter; the empty set if it names none.

    Follows "$ref" within the schema, and collects the types of all parts of "anyOf", "oneOf" and "allOf".
    """
    properties = schema.get("properties")
    known = properties if isinstance(properties, Mapping) else {}
    waiting: list[object] = [known.get(parameter, schema.get("additionalProperties"))]
    types: set[str] = set()
    seen: set[int] = set()  # by id, because references may be circular
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping) and id(part) not in seen:
            seen.add(id(part))
            types |= _named(part)
            if "type" not in part:
                waiting += _referenced(part.get("$ref"), schema), *_parts(part)
    return frozenset(types)


def _named(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema names in "type", else those of the values in its "enum" and "const"."""
    if "type" in schema:
        named = schema["type"]
        names = named if isinstance(named, list) else [named]
        return {_TYPES[name] for name in names if isinstance(name, str) and name in _TYPES}
    values = _list(schema, "enum") + [schema[key] for key in ("const",) if key in schema]
    return {_PYTHON_TYPES.get(type(value), "null") for value in values}


def _parts(schema: Mapping[str, Any]) -> list[Any]:
    return _list(schema, "anyOf") + _list(schema, "oneOf") + _list(schema, "allOf")


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    found = schema.get(key)
    return found if isinstance(found, list) else []


def _referenced(reference: object, root: Mapping[str, Any]) -> object:
    """Return the part of the tool's schema that the reference "#" or "#/…" names; None for any other reference."""
    if reference == "#":
        return root
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: object = root
    for key in reference[2:].split("/"):
        if not isinstance(found, Mapping):
            return None
        found = found.get(key.replace("~1", "/").replace("~0", "~"))
    return found


def quoted(text: str) -> str:
    """Escape text for the inside of a JSON string. Escaping piece by piece gives the same result."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class StringValue:
    """A string value, shown while it is generated. If it is nullable, the texts "null" and "None" are null."""

    def __init__(self, show: Callable[[str], None], nullable: bool) -> None:
        self._show = show
        self._nullable = nullable
        self._prefix = ""  # text held back while it may still become null
        self._shown = False  # whether the opening quote has been shown

    def add(self, text: str) -> None:
        if not self._shown:
            text = self._prefix = self._prefix + text
            if self._nullable and any(null.startswith(text) for null in _NULLS):
                return
            self._shown = True
            self._show('"')
        self._show(quoted(text))

    def end(self) -> None:
        """Show what is still held back of a value that is complete, such as its closing quote."""
        if self._shown:
            self._show('"')
        else:
            self._show("null" if self._prefix in _NULLS else f'"{quoted(self._prefix)}"')

    def cut(self) -> None:
        """Show the text that is held back, after the output has ended inside the value."""
        if not self._shown and self._prefix:
            self._show('"' + quoted(self._prefix))


class OtherValue:
    """A value that is not, or not certainly, a string: it is shown when it is complete."""

    def __init__(self, show: Callable[[str], None], types: frozenset[str]) -> None:
        self._show = show
        self._types = types
        self._parts: list[str] = []

    def add(self, text: str) -> None:
        self._parts.append(text)

    def end(self) -> None:
        self._show(converted("".join(self._parts), self._types))

    def cut(self) -> None:
        """Show a cut-off value as an unterminated string, so that no bracket in it makes the arguments valid JSON."""
        self._show('"' + quoted("".join(self._parts)))


def converted(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a value that was written as `text`.

    Text that is JSON stays JSON if its type is allowed, or if a string is not allowed; otherwise it becomes a string.
    If the types are known, true, false, null and None are recognised in upper and lower case. Text in quotes, for a
    parameter that may be a string, becomes a string that includes the quotes.
    """
    found = as_json(text)
    if found is None and types:
        found = _WORDS.get(text.strip().lower())
    if found is not None and (not types or "string" not in types or type_of(found) & types - {"string"}):
        return found
    return f'"{quoted(text)}"'


def type_of(value: str) -> frozenset[str]:
    """Return the types of a JSON value. An integer is a number too."""
    match value[0]:
        case "{":
            return frozenset({"object"})
        case "[":
            return frozenset({"array"})
        case '"':
            return frozenset({"string"})
        case "t" | "f":
            return frozenset({"boolean"})
        case "n":
            return frozenset({"null"})
    return frozenset({"number"} if set(value) & set(".eE") else {"number", "integer"})


def value_of(types: frozenset[str], show: Callable[[str], None]) -> StringValue | OtherValue:
    """Return the converter for a value of these types: it takes the text in pieces and shows its JSON."""
    if "string" in types and types <= {"string", "null"}:
        return StringValue(show, "null" in types)
    return OtherValue(show, types)
