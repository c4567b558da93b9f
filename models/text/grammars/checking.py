"""Checks that a grammar can be followed to its end, and errors that say which part of it cannot."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance._tokenizer import TokenizerWrapper

from baton.models.text.grammars import lark, schemas
from baton.models.text.grammars.errors import GrammarError
from baton.models.text.grammars.explaining import explained
from baton.models.text.grammars.schemas import ALTERNATIVES, Part, Parts, items_of, rebased, shown

# How many continuations the parser may have at one place: an optional property counts four, an alternative one.
MOST_AT_ONE_PLACE = 1000
PER_PROPERTY = 4
# Parts with fewer continuations at one place need no check: they are far enough from the limit.
SURELY_FEW = MOST_AT_ONE_PLACE // 2
MOST_PASSES = 8
MOST_CHECKED = 16  # wide parts of a schema, or regular expressions of a grammar
SHOWN_CHARACTERS = 60
BEGINNINGS = (b'{"', b'["', b'"')
EOS = 256


class Bytes:
    """A tokenizer whose tokens are the bytes, so that a grammar is checked without a model's large vocabulary."""

    eos_token_id = EOS
    bos_token_id = None
    special_token_ids = (EOS,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


class Checker:
    """A check of grammars that llguidance compiles. Safe to use from several threads."""

    def __init__(self, limits: LLParserLimits) -> None:
        self._limits = limits
        self._tokenizer = LLTokenizer(TokenizerWrapper(Bytes()), n_vocab=EOS + 1, eos_token=EOS, slices=[])

    def check(self, grammar: str) -> None:
        """Raise GrammarError, which names the part, if a part of the grammar can never be complete or is too wide."""
        for item in grammars_in(grammar):
            if isinstance(schema := item.get("json_schema"), Mapping):
                self._check_schema(schema)
            if isinstance(text := item.get("lark_grammar"), str):
                self._check_lark(text)

    def check_alone(self, grammar: str) -> None:
        """Check a grammar that has not been compiled for a model. Raises GrammarError."""
        matcher = self._matcher(grammar)
        if matcher.is_error():
            raise GrammarError(explained(matcher.get_error()))
        self.check(grammar)

    def _check_lark(self, text: str) -> None:
        try:
            contents = lark.contents_of(text)
        except lark.UnknownSyntax:
            return  # A dead end in it shows when an output reaches it.
        if problem := lark.dead_end_in(contents):
            raise GrammarError(problem)
        for _, schema in contents.schemas:
            if isinstance(schema, Mapping):
                self._check_schema(schema)
        for rule, regex in [*dict.fromkeys(contents.regexes)][:MOST_CHECKED]:
            matcher = self._matcher(f"start: {regex}")
            if not matcher.is_error() and not self._has_mask(matcher) and not matcher.is_accepting():
                within = f" in rule {rule!r}" if rule != lark.START else ""
                raise GrammarError(f"{regex[:SHOWN_CHARACTERS]}{within} matches no text")

    def _check_schema(self, schema: Mapping[str, Any]) -> None:
        parts = schemas.parts_of(schema)
        if problem := schemas.dead_end_in(parts):
            raise GrammarError(problem)
        for path in wide_parts(parts):
            if problem := self._problem_of(schema, path):
                raise GrammarError(f"{shown(path)} has {size_of(parts[path])}: {problem}")

    def _problem_of(self, schema: Mapping[str, Any], path: str) -> str:
        """Return why the parser fails at the beginning of a part's values; "" if it does not fail."""
        options = {"x-guidance": schema["x-guidance"]} if "x-guidance" in schema else {}
        try:
            text = json.dumps({"grammars": [{"json_schema": {**rebased(schema, path), **options}}]})
        except RecursionError:
            return ""
        whole = self._matcher(text)
        for beginning in BEGINNINGS:
            matcher = whole.deep_copy()
            for byte in beginning:
                if not self._has_mask(matcher) or matcher.try_consume_tokens([byte]) == 0:
                    break
            self._has_mask(matcher)
            if matcher.is_error():
                return explained(matcher.get_error())
        return ""

    def _matcher(self, grammar: str) -> LLMatcher:
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)

    def _has_mask(self, matcher: LLMatcher) -> bool:
        return not matcher.is_stopped() and any(matcher.compute_bitmask()[: EOS // 8])


def grammars_in(text: str) -> Iterator[Mapping[str, Any]]:
    """Yield llguidance's items of a grammar: each has a "json_schema" or a "lark_grammar"."""
    try:
        yield from json.loads(text)["grammars"]
    except (ValueError, TypeError, KeyError):
        yield {"lark_grammar": text}


def wide_parts(parts: Parts) -> Sequence[str]:
    """Return the parts at whose beginnings the parser may have too many continuations, inner parts first."""
    own = {path: PER_PROPERTY * optional_in(part) + alternatives_in(part) for path, part in parts.items()}
    widths = dict(own)
    for _ in range(MOST_PASSES):
        for path in reversed(parts):
            inner = sum(widths.get(each, 0) for each in parts[path].others)
            widths[path] = min(own[path] + inner, MOST_AT_ONE_PLACE + 1)
    wide = [path for path in reversed(parts) if own[path] and widths[path] > SURELY_FEW]
    return wide[:MOST_CHECKED]


def optional_in(part: Part) -> int:
    """Return the number of a part's optional properties."""
    properties = part.schema.get("properties")
    names = properties.keys() if isinstance(properties, Mapping) else set[str]()
    return len(names - {each for each in items_of(part.schema, "required") if isinstance(each, str)})


def alternatives_in(part: Part) -> int:
    return sum(len(items_of(part.schema, keyword)) for keyword in ALTERNATIVES)


def size_of(part: Part) -> str:
    """Describe the wider side of a part."""
    optional, alternatives = optional_in(part), alternatives_in(part)
    return f"{optional} optional properties" if optional >= alternatives else f"{alternatives} alternatives"
