"""The parts of a JSON schema, and its dead ends: parts that no finite JSON satisfies: they must contain themselves."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias
from urllib.parse import unquote

from baton.models.text.grammars.endless import Group, cycle_from, endless_in

ALTERNATIVES = ("anyOf", "oneOf")
COMPOSITES = {"object", "array"}
# Keywords by the form of their value: a schema, a list of schemas, or schemas by name.
SINGLE = ("additionalProperties", "items")
LISTED = ("prefixItems", "allOf", *ALTERNATIVES)
NAMED = ("properties", "patternProperties")
# Keywords whose schemas are about the value itself, not about what it contains.
OF_THE_SAME_VALUE = ("allOf", *ALTERNATIVES)
# Keywords whose values may look like schemas, but are data.
VALUES = ("enum", "const")
DATA = (*VALUES, "default", "examples")
WHOLE = "whole"


@dataclass(frozen=True)
class Part:
    """One schema within a schema."""

    schema: Mapping[str, Any]
    groups: Sequence[Group]  # the paths of the parts that a value must satisfy or contain
    others: Sequence[str]  # parts that describe the same value: those in allOf, anyOf and oneOf, and that of $ref


Parts: TypeAlias = dict[str, Part]
"""Parts by their path, such as "#/properties/a". The root, "#", comes first, and outer parts come before inner ones."""


def parts_of(root: Mapping[str, Any]) -> Parts:
    """Return all parts of a schema that a value may have to satisfy."""
    anchors = anchors_in(root)
    found: dict[str, Part] = {}
    waiting: list[tuple[str, object]] = [("#", root)]
    for path, schema in waiting:  # The loop also reaches the items that are added meanwhile.
        if path in found or not isinstance(schema, Mapping):
            continue
        target = target_of(schema, anchors)
        inner = list(inner_schemas(path, schema))
        waiting += inner
        if target is not None:
            waiting.append((target, value_at(root, target)))
        same = [p for p, _ in inner if p.removeprefix(f"{path}/").split("/")[0] in OF_THE_SAME_VALUE]
        references = [target] if target is not None else []
        found[path] = Part(schema, groups_of(path, schema, references), [*references, *same])
    return found


def inner_schemas(path: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield the schemas directly inside a schema, with their paths."""
    for keyword in SINGLE:
        yield f"{path}/{keyword}", schema.get(keyword)
    for keyword in LISTED:
        for index, inner in enumerate(items_of(schema, keyword)):
            yield f"{path}/{keyword}/{index}", inner
    for keyword in NAMED:
        named = schema.get(keyword)
        for name, inner in named.items() if isinstance(named, Mapping) else ():
            yield f"{path}/{keyword}/{escaped(name)}", inner


def groups_of(path: str, schema: Mapping[str, Any], references: Sequence[str]) -> list[Group]:
    """Return the groups of parts that a value of the schema must satisfy or contain."""
    groups: list[Group] = [[[target]] for target in references]
    groups += [[[f"{path}/allOf/{index}"]] for index in range(len(items_of(schema, "allOf")))]
    for keyword in ALTERNATIVES:
        if count := len(items_of(schema, keyword)):
            groups.append([[f"{path}/{keyword}/{index}"] for index in range(count)])
    types = schema.get("type")
    types = types if isinstance(types, list) else [types]
    # Only objects and arrays contain other values, and with "enum" or "const" these are finite too.
    if all(isinstance(each, str) for each in types) and COMPOSITES.issuperset(types) and not {*VALUES} & schema.keys():
        needs = {"object": needed_properties, "array": needed_items}
        groups.append([needs[each](path, schema) for each in types])
    return groups


def needed_properties(path: str, schema: Mapping[str, Any]) -> list[str]:
    """Return the paths of the schemas of an object's required properties."""
    properties = schema.get("properties")
    listed = properties if isinstance(properties, Mapping) else {}
    names = [name for name in items_of(schema, "required") if isinstance(name, str)]
    return [
        f"{path}/properties/{escaped(name)}" if name in listed else f"{path}/additionalProperties" for name in names
    ]


def needed_items(path: str, schema: Mapping[str, Any]) -> list[str]:
    """Return the paths of the schemas of the items that an array must have."""
    least, first = schema.get("minItems"), len(items_of(schema, "prefixItems"))
    count = least if isinstance(least, int) else 0
    needed = [f"{path}/prefixItems/{index}" for index in range(min(count, first))]
    return [*needed, f"{path}/items"] if count > first else needed


def dead_end_in(parts: Parts) -> str:
    """Return a message that names a part that no finite value satisfies, and the reason; "" if there is none."""
    needs = {path: part.groups for path, part in parts.items()}
    endless = endless_in(needs)
    if not endless:
        return ""
    cycle = cycle_from(next(iter(endless)), needs, endless.keys())
    contained = [inner for outer, inner in pairwise(cycle) if inner not in parts[outer].others]
    if not contained:
        return f"{shown(cycle[0])} refers only to itself, so no value follows it"
    again = shown(cycle[0]) if contained[-1] != cycle[0] else "itself"
    why = "so no value of it would ever end: make a part optional, or allow null"
    return f"{shown(contained[-1])} must contain {again} again, {why}"


def rebased(root: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return a schema for the part at `path` alone, in which all references of the root still hold."""
    return {"$ref": f"#/$defs/{WHOLE}{path[1:]}", "$defs": {WHOLE: moved(root)}}


def moved(value: Any) -> Any:
    """Return the schema with each reference to a path from the root changed to the same path from #/$defs/whole."""
    if isinstance(value, list):
        return [moved(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    inner = {name: each if name in DATA else moved(each) for name, each in value.items()}
    reference = value.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        inner["$ref"] = f"#/$defs/{WHOLE}{reference[1:]}"
    return inner


def anchors_in(root: Mapping[str, Any]) -> dict[str, str]:
    """Return the paths of the schemas that have an "$anchor", by its name."""
    found: dict[str, str] = {}
    waiting: list[tuple[str, object]] = [("#", root)]
    for path, value in waiting:
        if isinstance(value, Mapping):
            anchor = value.get("$anchor")
            if isinstance(anchor, str):
                found[f"#{anchor}"] = path
            waiting += ((f"{path}/{escaped(name)}", each) for name, each in value.items())
        elif isinstance(value, list):
            waiting += ((f"{path}/{index}", each) for index, each in enumerate(value))
    return found


def target_of(schema: Mapping[str, Any], anchors: Mapping[str, str]) -> str | None:
    """Return the path that the schema's "$ref" names; None without one, or if it leads out of the document."""
    reference = schema.get("$ref")
    if not isinstance(reference, str):
        return None
    path = unquote(reference)
    return path if path == "#" or path.startswith("#/") else anchors.get(path)


def value_at(root: Mapping[str, Any], path: str) -> object:
    """Return the value at a path; None if there is none."""
    value: object = root
    for key in path.split("/")[1:]:
        name = key.replace("~1", "/").replace("~0", "~")
        if isinstance(value, Mapping):
            value = value.get(name)
        elif isinstance(value, list) and name.isascii() and name.isdigit() and int(name) < len(value):
            value = value[int(name)]
        else:
            return None
    return value


def items_of(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    found = schema.get(keyword)
    return found if isinstance(found, list) else []


def escaped(name: object) -> str:
    """Write a name as one step of a path."""
    return str(name).replace("~", "~0").replace("/", "~1")


def shown(path: str) -> str:
    """Name a part in an error message."""
    return "the whole schema (#)" if path == "#" else path
