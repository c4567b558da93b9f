"""Values that a model writes as plain text, made JSON by the schema of the tool's parameters."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from baton.models.text.formats.json_scanner import as_json

# Of each tool by name: the JSON schema of its parameters, an object's.
Tools = Mapping[str, Mapping[str, Any]]

_TYPES = {
    **{name: name for name in ("string", "integer", "number", "boolean", "object", "array", "null")},
    # What schemas that were made of a language's types say instead.
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "dict": "object",
    "list": "array",
}
_OF_PYTHON = {bool: "boolean", str: "string", int: "integer", float: "number", dict: "object", list: "array"}
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
_NULLS = ("null", "None")


def types_of(parameter: str, schema: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that a parameter may have by its tool's schema; none if that does not say."""
    properties = schema.get("properties")
    known = properties if isinstance(properties, Mapping) else {}
    waiting: list[object] = [known.get(parameter, schema.get("additionalProperties"))]
    types: set[str] = set()
    seen: set[int] = set()
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping) and id(part) not in seen:
            seen.add(id(part))
            types |= _named(part)
            if "type" not in part:
                waiting += _referenced(part.get("$ref"), schema), *_parts(part)
    return frozenset(types)


def _named(schema: Mapping[str, Any]) -> set[str]:
    """The types that a schema names itself, or that the values have which it lists."""
    if "type" in schema:
        named = schema["type"]
        names = named if isinstance(named, list) else [named]
        return {_TYPES[name] for name in names if isinstance(name, str) and name in _TYPES}
    values = _list(schema, "enum") + [schema[key] for key in ("const",) if key in schema]
    return {_OF_PYTHON.get(type(value), "null") for value in values}


def _parts(schema: Mapping[str, Any]) -> list[Any]:
    return _list(schema, "anyOf") + _list(schema, "oneOf") + _list(schema, "allOf")


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    found = schema.get(key)
    return found if isinstance(found, list) else []


def _referenced(reference: object, root: Mapping[str, Any]) -> object:
    """What "#/…" names within the tool's own schema."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: object = root
    for key in reference[2:].split("/"):
        if not isinstance(found, Mapping):
            return None
        found = found.get(key.replace("~1", "/").replace("~0", "~"))
    return found


def quoted(text: str) -> str:
    """Text as the inside of a JSON string; piece by piece it gives the same."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class StringValue:
    """A string, shown as it comes; "null" and "None" alone are null if that may be."""

    def __init__(self, show: Callable[[str], None], nullable: bool) -> None:
        self._show = show
        self._nullable = nullable
        self._begun = ""
        self._shown = False

    def add(self, text: str) -> None:
        if not self._shown:
            text = self._begun = self._begun + text
            if self._nullable and any(null.startswith(text) for null in _NULLS):
                return
            self._shown = True
            self._show('"')
        self._show(quoted(text))

    def end(self) -> None:
        """The value is complete."""
        if self._shown:
            self._show('"')
        else:
            self._show("null" if self._begun in _NULLS else f'"{quoted(self._begun)}"')

    def cut(self) -> None:
        """There is no end of it: what has come is shown."""
        if not self._shown and self._begun:
            self._show('"' + quoted(self._begun))


class OtherValue:
    """A value of other types, or of several or none that is known, shown at its end."""

    def __init__(self, show: Callable[[str], None], types: frozenset[str]) -> None:
        self._show = show
        self._types = types
        self._parts: list[str] = []

    def add(self, text: str) -> None:
        self._parts.append(text)

    def end(self) -> None:
        self._show(converted("".join(self._parts), self._types))

    def cut(self) -> None:
        """Shown as a string that does not end, so that no bracket in it makes JSON of half a call."""
        self._show('"' + quoted("".join(self._parts)))


def converted(text: str, types: frozenset[str]) -> str:
    """The JSON of a value: what it is if it is JSON of one of the types, or if no string may be; else a string.

    true, false, null and None count in any case of their letters where the types are known. Text in quotes, for a
    parameter that may be a string, is that string, quotes and all.
    """
    found = as_json(text)
    if found is None and types:
        found = _WORDS.get(text.strip().lower())
    if found is not None and (not types or "string" not in types or type_of(found) & types - {"string"}):
        return found
    return f'"{quoted(text)}"'


def type_of(value: str) -> frozenset[str]:
    """The types that JSON text is of: an integer is a number too."""
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
    """What takes the text of a value of these types and shows its JSON."""
    if "string" in types and types <= {"string", "null"}:
        return StringValue(show, "null" in types)
    return OtherValue(show, types)
