"""JSON as a client may write it, including what no library writes: huge numbers, duplicate keys, broken text."""

import json
from dataclasses import dataclass
from random import Random
from typing import Any

BROKEN = (
    "",
    " ",
    "null",
    "[]",
    "{",
    '{"',
    "{}{}",
    "\ufeff{}",
    "NaN",
    '"text"',
    "[[[[",
    "{'a': 1}",
    "{a: 1}",
    '{"a": 1,}',
)


@dataclass(frozen=True)
class Raw:
    """A value that is written to JSON as exactly this text."""

    text: str


def to_json(value: Any) -> str:
    match value:
        case Raw(text):
            return text
        case dict():
            return "{" + ",".join(f"{json.dumps(key)}:{to_json(item)}" for key, item in value.items()) + "}"
        case list():
            return "[" + ",".join(map(to_json, value)) + "]"
    return json.dumps(value)


def nested(depth: int, random: Random) -> Raw:
    opening, closing = random.choice([("[", "]"), ('{"a":', "}")])
    return Raw(opening * depth + "1" + closing * depth)


def break_text(text: str, random: Random) -> bytes:
    """Change the text at random, so that it may no longer be JSON."""
    data = text.encode("utf-8", "surrogatepass")
    at = random.randrange(len(data) + 1)
    match random.randrange(8):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + bytes([random.randrange(256)]) + data[at + 1 :]
        case 2:
            return (
                data[:at]
                + random.choice([b'"', b",", b"\x00", b"\xff", b"\\u", b"1e400", b"-", b"[", b"}"])
                + data[at:]
            )
        case 3:
            return data + data
        case 4:
            return text.encode("utf-16")
        case 5:
            return b"[" + data + b"]"
        case 6:
            return data.replace(b":", random.choice([b":-", b":0", b":[", b"::"]), 1)
    return random.choice(BROKEN).encode()


def repeat_key(text: str, key: str, value: Any, random: Random) -> str:
    """Add a member to a JSON object's text, before or after its members, where it may repeat a key."""
    member = f"{json.dumps(key)}:{to_json(value)}"
    inner = text[1:-1]
    pair = [member, inner] if random.random() < 0.5 else [inner, member]
    return "{" + ",".join(part for part in pair if part) + "}"
