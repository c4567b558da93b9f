"""Grammars as texts, from what clients ask for: llguidance's JSON for a schema or a regex, else its form of Lark."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from baton.models.text.grammars.matcher import GrammarError

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# A space, or a line's end and what it is indented by: any would let a model write spaces until it is cut off.
SPACE = r"\n[ \t]{0,64}|[ \t]"
# Of a regex, a grammar, or all that there is to choose from: a longer one takes seconds to compile.
MOST_CHARACTERS = 50_000
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def json_schema(schema: Mapping[str, Any] | str, strict: bool = True) -> str:
    """JSON that follows the schema, itself or its text; any number of oneOf may hold.

    strict: keywords that cannot be held are an error, when it is compiled; else they are left out. GrammarError for a
    text that holds no object.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"the schema is not valid JSON: {error}") from error
    if not isinstance(schema, Mapping):
        raise GrammarError("the schema must be an object")
    options: JsonCompileOptions = {"whitespace_pattern": SPACE, "coerce_one_of": True, "lenient": not strict}
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
    except (ValueError, RecursionError) as error:
        raise GrammarError(str(error)) from error


def regex(pattern: str) -> str:
    """The whole output matches the pattern, in the syntax of Rust's regex; ^ and $ around it change nothing."""
    check_length(pattern)
    inner = pattern.removeprefix("^")
    if inner.endswith("$") and (len(inner) - len(inner[:-1].rstrip("\\"))) % 2 == 1:
        inner = inner[:-1]
    return LLMatcher.grammar_from_regex(inner)


def choice(texts: Sequence[str]) -> str:
    """One of these. GrammarError if there is none."""
    if not texts:
        raise GrammarError("there is nothing to choose from")
    check_length("".join(texts))
    return "start: TEXT\nTEXT: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


def grammar(text: str) -> str:
    """In llguidance's form of Lark, or in GBNF (llama.cpp's, xgrammar's EBNF), which is turned into it."""
    check_length(text)
    try:
        return any_to_lark(text)
    except Exception as error:  # The library raises plain Exception for everything.
        raise GrammarError(f"neither Lark nor GBNF: {error}") from error


def check_length(text: str) -> None:
    if len(text) > MOST_CHARACTERS:
        raise GrammarError(f"it has {len(text)} characters; at most {MOST_CHARACTERS} are supported")
