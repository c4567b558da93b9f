"""Values of a type described by msgspec.inspect: valid values, and values with which a client may break something."""

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from msgspec import Struct, inspect

from tests.fuzz.json_text import Raw, nested

TEXTS = (
    "Hi",
    "",
    "a b",
    "é",
    "日本語",
    "👩‍🚀",
    "\x00",
    "\u202eabc",
    "<|im_end|>",
    "{{ 1 }}",
    "\r\n\r\n",
    "-1",
    "null",
    "\uffff",
)
LONG = (100, 300, 3_000, 30_000)
WHOLE = (
    0, -1, 1, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64,
    -(2**31) - 1, -(2**63), -(2**63) - 1, 10**30, -(10**30), 10**400,
)  # fmt: skip
NUMBERS = (
    "-0",
    "-0.0",
    "0.0",
    "1.0",
    "1e0",
    "0.5",
    "5e-324",
    "1e-40",
    "1e308",
    "1e400",
    "-1e400",
    "NaN",
    "Infinity",
    "00",
    "1e",
)
DIGITS = (4300, 4301, 5000)
JUNK = (
    None,
    True,
    False,
    "",
    "0",
    "1",
    "-1",
    "NaN",
    "true",
    "٣",
    [],
    {},
    [[]],
    [None],
    {"": None},
    {"a": {"b": []}},
    [0],
    "a\x00",
)
SURROGATE = Raw('"\\ud800"')
DEEP = (20, 300, 5000, *range(960, 1000))
TOKEN_KEYS = "token keys"  # marks, as Meta(extra={"kind": ...}), strings that name a token
UNICODE_DIGITS = ("٣", "²", "１", "০")
# Fields that other fields require, so they are drawn more often.
OFTEN = frozenset({"logprobs", "return_logprob", "min_tokens"})
# Fields that limit the length of an answer. They are drawn often, to keep requests cheap.
CHEAP = frozenset({"max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens"})


class Values:
    """A source of random values of types.

    vocab: token ids are below this number
    shapes: types to draw from instead of the declared ones, by Struct and field name
    likely: for a field name, values that exist on the server
    one_of: for a Struct, the fields of which a request must have exactly one
    """

    def __init__(
        self,
        random: Random,
        vocab: int,
        shapes: Mapping[tuple[type[Struct], str], inspect.Type],
        likely: Mapping[str, tuple[Any, ...]],
        one_of: Mapping[type[Struct], tuple[str, ...]],
    ) -> None:
        self.random = random
        self._vocab = vocab
        self._shapes = shapes
        self._likely = likely
        self._one_of = one_of

    def body(self, kind: type[Struct], hostile: int) -> dict[str, Any]:
        """Draw the fields of a request, `hostile` of which get values that no client should send."""
        fields = self._fields(kind)
        group = self._one_of.get(kind, ())
        names = {name for name, (_, required) in fields.items() if self._is_present(name, required)} - set(group)
        names |= {self.random.choice(group)} if group else set()
        result = {name: self.valid(type, name) for name, (type, _) in fields.items() if name in names}
        for name in self.random.choices(list(fields), [weight(type) for type, _ in fields.values()], k=hostile):
            result[name] = self.hostile(fields[name][0], name)
        return result

    def _fields(self, kind: type[Struct]) -> dict[str, tuple[inspect.Type, bool]]:
        """Return the type of each field, and whether the field is required."""
        info = inspect.type_info(kind)
        assert isinstance(info, inspect.StructType)
        return {
            field.encode_name: (self._shapes.get((kind, field.name), field.type), field.required)
            for field in info.fields
        }

    def _is_present(self, name: str, required: bool) -> bool:
        return required or self.random.random() < (0.8 if name in CHEAP else 0.5 if name in OFTEN else 0.2)

    # Valid

    def valid(self, kind: inspect.Type, name: str = "") -> Any:
        """Draw a valid value of this type for the field `name`."""
        random = self.random
        if name in self._likely and not isinstance(kind, inspect.LiteralType) and random.random() < 0.9:
            return random.choice(self._likely[name])
        match kind:
            case inspect.Metadata():
                return str(random.randrange(self._vocab)) if is_token_key(kind) else self.valid(kind.type, name)
            case inspect.UnionType():
                return self.valid(random.choice([t for t in kind.types if not isinstance(t, inspect.NoneType)]), name)
            case inspect.BoolType():
                return random.random() < 0.5
            case inspect.IntType():
                return self._whole(*bounds(kind))
            case inspect.FloatType():
                low, high = bounds(kind)
                return random.choice(
                    [low, high, 1.0 if low < 1 <= high else high, low + (high - low) * random.random()]
                )
            case inspect.StrType():
                return self._text(kind)
            case inspect.LiteralType():
                return random.choice(kind.values)
            case inspect.ListType():
                return [self.valid(kind.item_type, name) for _ in range(random.randint(kind.min_length or 0, 4))]
            case inspect.DictType():
                count = random.randint(0, 3)
                return {str(self.valid(kind.key_type)): self.valid(kind.value_type) for _ in range(count)}
            case inspect.StructType():
                return self.body(kind.cls, hostile=0)
        return random.choice(JUNK)

    def _whole(self, low: int, high: int) -> int:
        """Draw an integer in a range, usually a small one: large ones make the server compute for a long time."""
        random, near = self.random, max(low, min(0, high))
        if random.random() < 0.85:
            return random.randint(near, min(near + 8, high))
        return random.choice([low, high, random.randint(low, high)])

    def _text(self, kind: inspect.StrType) -> str:
        if kind.pattern:
            return self.random.choice(["a", "b.c", "d_1", "e-2"])
        least, most = kind.min_length or 0, kind.max_length if kind.max_length is not None else 40
        text = self.random.choice(TEXTS)[:most]
        return text if len(text) >= least else "a" * least

    # Hostile

    def hostile(self, kind: inspect.Type, name: str = "") -> Any:
        """Draw a value that no client should send for this type, usually one that is almost valid."""
        random = self.random
        match kind:
            case inspect.Metadata() if is_token_key(kind):
                return self.token_key()
            case inspect.Metadata():
                return self.hostile(kind.type, name)
            case inspect.UnionType():
                return self.hostile(random.choice([t for t in kind.types if not isinstance(t, inspect.NoneType)]), name)
        if random.random() < 0.3:
            return self.wrong()
        match kind:
            case inspect.IntType():
                low, high = bounds(kind)
                return random.choice(
                    [random.choice([low - 1, high + 1, high, low, Raw(f"{low}.0"), str(low)]), random.choice(WHOLE)]
                )
            case inspect.FloatType():
                low, high = bounds(kind)
                return random.choice([low - 1e-9, high + 1e-9, -high, high * 2, Raw(random.choice(NUMBERS)), str(low)])
            case inspect.StrType() | inspect.LiteralType():
                return random.choice([*TEXTS, "a" * random.choice(LONG), "/../", "%00", SURROGATE])
            case inspect.ListType():
                return self._hostile_list(kind, name)
            case inspect.DictType():
                return self._hostile_dict(kind)
            case inspect.StructType():
                return self.body(kind.cls, hostile=1) | ({"unknown": 1} if random.random() < 0.1 else {})
        return self.wrong()

    def _hostile_list(self, kind: inspect.ListType, name: str) -> Any:
        random = self.random
        if random.random() < 0.15:
            return [self.valid(kind.item_type, name)] * random.choice(LONG)
        items = [self.valid(kind.item_type, name) for _ in range(random.randint(0, 3))]
        items.insert(random.randint(0, len(items)), self.hostile(kind.item_type, name))
        return items

    def _hostile_dict(self, kind: inspect.DictType) -> Any:
        random = self.random
        items = {str(self.valid(kind.key_type)): self.valid(kind.value_type) for _ in range(random.randint(0, 2))}
        if random.random() < 0.7:
            key = self.hostile(kind.key_type)
            items[key if isinstance(key, str) else to_key(key)] = self.valid(kind.value_type)
        else:
            items[str(self.valid(kind.key_type))] = self.hostile(kind.value_type)
        return items

    def wrong(self) -> Any:
        """Draw a value without regard to the field's type."""
        random = self.random
        draw: Callable[[], Any] = random.choice(
            [
                lambda: random.choice(JUNK),
                lambda: random.choice(JUNK),
                lambda: random.choice(WHOLE),
                lambda: Raw(random.choice(NUMBERS)),
                lambda: Raw(random.choice("123456789") * random.choice(DIGITS)),
                lambda: nested(random.choice(DEEP), random),
                lambda: SURROGATE,
                lambda: "a" * random.choice(LONG),
            ]
        )
        return draw()

    def token_key(self) -> str:
        """Draw a string that the server's code may mistake for a token id."""
        random = self.random
        id = random.choice([0, self._vocab - 1, self._vocab, self._vocab + 1, *WHOLE])
        if random.random() < 0.3:
            return "0" * random.randint(1, 30) + str(id)
        sign = random.choice(["-", "+", " ", "0x", "_"])
        return random.choice([str(id), sign + str(id), f"{id}.0", "9" * 5000, "", *UNICODE_DIGITS, "1e2", "a", "NaN"])


def weight(kind: inspect.Type) -> int:
    """Return how often a field of this type becomes the hostile one, relative to a request's other fields."""
    match kind:
        case inspect.UnionType():
            return max(map(weight, kind.types))
        case inspect.ListType(item_type=inspect.StructType()) | inspect.StructType():
            return 8
        case inspect.ListType() | inspect.DictType():
            return 5
        case inspect.IntType() | inspect.FloatType():
            return 3
    return 1


def bounds(kind: inspect.IntType | inspect.FloatType) -> tuple[Any, Any]:
    """Return the least and the greatest value of a range, both included."""
    step: Any = 1 if isinstance(kind, inspect.IntType) else 1e-6
    low: Any = kind.ge if kind.ge is not None else kind.gt + step if kind.gt is not None else -(2**62)
    high: Any = kind.le if kind.le is not None else kind.lt - step if kind.lt is not None else 2**62
    return (low, high) if isinstance(kind, inspect.IntType) else (float(low), float(high))


def is_token_key(kind: inspect.Metadata) -> bool:
    return (kind.extra or {}).get("kind") == TOKEN_KEYS


def to_key(value: Any) -> str:
    return str(value)[:50]
