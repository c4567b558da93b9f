"""Random JSON schemas of the supported kinds."""

import random
from typing import Any

NAMES = ("name", "a b", "ü", "x", "list", "count", "when", 'q"q')


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    kinds = [string, number, boolean, constant, named, nullable]
    if depth < 3:
        kinds += [of_object, of_object, of_array, either]
    schema = rng.choice(kinds)(rng, depth)
    return schema if depth or rng.random() < 0.8 else shared(rng)


def string(rng: random.Random, depth: int) -> dict[str, Any]:
    return rng.choice(
        [
            {"type": "string", "maxLength": rng.randint(0, 12)},
            {"type": "string", "minLength": 1, "maxLength": 6},
            {
                "type": "string",
                "pattern": rng.choice(["^[a-z]{1,4}$", "^\\d{3}(-\\d)?$", "^(ab|cd)+x$", '^[^"\\\\a]{2}$']),
            },
            {"type": "string", "format": rng.choice(["date", "time", "uuid", "ipv4"])},
        ]
    )


def number(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-200, 200)
    return rng.choice(
        [
            {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)},
            {"type": "number", "minimum": low, "exclusiveMaximum": low + 7.5},
            {"type": "integer", "multipleOf": rng.choice([2, 5, 7]), "minimum": 0, "maximum": 99},
        ]
    )


def boolean(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "boolean"}


def constant(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"const": rng.choice([1, "x y", None, True, [1, {"a": "ä"}]])}


def named(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": rng.sample(["red", "green", 3, None, 2.5, 'a"b', False], rng.randint(1, 4))}


def nullable(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": ["boolean", "null"]}


def of_array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    sizes = {"minItems": least, "maxItems": least + rng.randint(0, 3)}
    if rng.random() < 0.3:
        first = [random_schema(rng, depth + 1) for _ in range(2)]
        return {"type": "array", "prefixItems": first, "items": False, "minItems": 2}
    return {"type": "array", "items": random_schema(rng, depth + 1), **sizes}


def of_object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(0, 4))
    properties = {name: random_schema(rng, depth + 1) for name in names}
    required = [name for name in names if rng.random() < 0.6]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def either(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}


def shared(rng: random.Random) -> dict[str, Any]:
    """Return the schema of a tree whose nodes share one definition."""
    node = {
        "type": "object",
        "properties": {"value": {"type": "boolean"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
        "required": ["value", "next"],
        "additionalProperties": False,
    }
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}
