"""Texts of grammars for clients' requests: llguidance's JSON for a schema or a regex, otherwise its dialect of Lark."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from baton.models.text.grammars.errors import GrammarError

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# White space between two tokens of JSON: one space, or a line break and its indentation, which is at most six levels of
# four spaces. A model that prefers white space would write as much of it as a grammar allows, at every place.
SPACE = r"\n( {0,24}|\t{0,6})| "
# Limit for a regex, a grammar, or all texts of a choice together: longer texts take seconds to compile.
MOST_CHARACTERS = 50_000
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def json_schema(schema: Mapping[str, Any] | str, strict: bool = True) -> str:
    """Return a grammar for JSON that follows the schema. "oneOf" is treated as "anyOf".

    schema: an object, or its JSON text. Raises GrammarError if the text is not that of an object.
    strict: whether keywords that cannot be enforced are an error when the grammar is compiled; otherwise they are
    ignored.
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
    """Return a grammar for outputs that match the pattern as a whole, in the syntax of Rust's regex.

    A ^ at the beginning and a $ at the end are removed: the whole output has to match anyway.
    """
    check_length(pattern)
    inner = pattern.removeprefix("^")
    if inner.endswith("$") and (len(inner) - len(inner[:-1].rstrip("\\"))) % 2 == 1:
        inner = inner[:-1]
    return LLMatcher.grammar_from_regex(inner)


def choice(texts: Sequence[str]) -> str:
    """Return a grammar for outputs that are one of `texts`. Raises GrammarError if `texts` is empty."""
    if not texts:
        raise GrammarError("there is nothing to choose from")
    check_length("".join(texts))
    return "start: TEXT\nTEXT: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


def grammar(text: str) -> str:
    """Return a client's grammar in llguidance's dialect of Lark.

    text: a grammar in that dialect, or in GBNF (as in llama.cpp, or xgrammar's EBNF), which is converted.
    """
    check_length(text)
    try:
        return any_to_lark(text)
    except Exception as error:  # The library raises plain Exception for everything.
        raise GrammarError(f"neither Lark nor GBNF: {error}") from error


def check_length(text: str) -> None:
    if len(text) > MOST_CHARACTERS:
        raise GrammarError(f"it has {len(text)} characters; at most {MOST_CHARACTERS} are supported")
