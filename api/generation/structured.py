"""Structured output: the fields of OpenAI, vLLM and SGLang that constrain it, and the compiler of their grammars."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

from msgspec import Struct, ValidationError, convert

from baton.api import errors
from baton.api.generation.fields import RequestFields
from baton.api.generation.offload import OwnThread
from baton.api.parsing import invalid
from baton.models.text.grammars import writing
from baton.models.text.grammars.compiling import CompiledGrammar, Grammars
from baton.models.text.grammars.errors import GrammarError

MOST_SECONDS = 1.0  # a request's wait for a free thread, and the processor time of its grammar's compilation
MOST_WAITS = 10  # maximum times `MOST_SECONDS` that a compilation may last on a busy machine
MOST_AT_ONCE = 2  # maximum grammars that are compiled at the same time


class JsonSchemaFormat(Struct):
    """OpenAI's `json_schema`."""

    name: str = ""
    schema: dict[str, Any] | None = None
    strict: bool | None = None  # refuse a schema with parts that a grammar cannot enforce
    description: str | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True):
    """OpenAI's `response_format`, with the extensions of llama.cpp and Together, and of Hugging Face's clients."""

    type: Literal["text", "json_object", "json_schema", "json", "regex"]  # json: a json_object with a schema
    json_schema: JsonSchemaFormat | None = None
    schema: dict[str, Any] | None = None  # llama.cpp and Together: a schema for type json_object
    value: dict[str, Any] | str | None = None  # Hugging Face: a schema for json_object or json, or the regex


class TextFormat(Struct):
    """The `text.format` of Responses: a response format whose schema fields are on the same level as the type."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = ""
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`, with at most one constraint."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: bool | None = None  # accepted, without effect
    disable_any_whitespace: bool | None = None  # accepted, without effect


class StructuredFields(RequestFields, forbid_unknown_fields=True, kw_only=True):
    """The fields of chat completions, completions and turns that constrain the output. All that are set must agree."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None  # accepted, without effect
    json_schema: dict[str, Any] | str | None = None  # this and the next two: SGLang's fields
    regex: str | None = None
    ebnf: str | None = None


# For each field of the body that asks for a grammar, a function that returns the text of that grammar.
# Empty: the output may be any text.
GrammarWriters = dict[str, Callable[[], str]]
GrammarsOfTools: TypeAlias = Mapping[str, Callable[[], str]]
"""Functions that return the texts of the grammars of tools' parameters, by the names of the tools."""
NO_TOOLS: GrammarsOfTools = {}
# SGLang's names of fields by kind of constraint, as `of_kinds` needs them.
SGLANG = {"json": "json_schema", "regex": "regex", "grammar": "ebnf"}


def wanted_in(body: StructuredFields) -> GrammarWriters:
    """Return the grammar writers of all constraints in a body. Raises ApiError 400."""
    writers = of_format(body.response_format, "response_format")
    if (outputs := body.structured_outputs) is not None:
        writers |= of_kinds(outputs.json, outputs.regex, outputs.choice, outputs.grammar, named("structured_outputs."))
        if outputs.json_object:
            writers["structured_outputs.json_object"] = any_object
    kinds = body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar
    writers |= of_kinds(*kinds, named("guided_"))
    return writers | of_kinds(body.json_schema, body.regex, None, body.ebnf, SGLANG)


def of_format(format: ResponseFormat | None, field: str) -> GrammarWriters:
    """Return the grammar writer of a response_format, if it needs one. Raises ApiError 400, which names `field`."""
    if format is None:
        return {}
    if format.value is not None and (format.type in ("text", "json_schema") or format.schema is not None):
        message = f"{field}.value is for the types json_object, json and regex, without {field}.schema"
        raise errors.bad_request(message, f"{field}.value", "invalid_value")
    match format.type:
        case "text":
            return {}
        case "json_schema":
            if (inner := format.json_schema) is None:
                raise errors.bad_request(f"{field}.json_schema is required", field, "missing_required_parameter")
            return of_schema(format.type, inner.schema, inner.strict, field, f"{field}.json_schema.schema")
        case "regex":
            return of_regex(format.value, f"{field}.value")
        case "json_object" if format.schema is None and format.value is None:
            return {field: any_object}
        case _:
            name, schema = ("schema", format.schema) if format.schema is not None else ("value", format.value)
            return of_schema("json_schema", schema, None, field, f"{field}.{name}")


def of_text(format: Mapping[str, Any], field: str) -> GrammarWriters:
    """Return the grammar writer of Responses' text.format, if it needs one. Raises ApiError 400."""
    try:
        text = convert(format, TextFormat)
    except ValidationError as error:
        raise invalid(str(error), field) from None
    return of_schema(text.type, text.schema, text.strict, field, f"{field}.schema")


def of_regex(value: object, place: str) -> GrammarWriters:
    """Return the grammar writer for a regex. Raises ApiError 400. place: the body's path of the regex."""
    if not isinstance(value, str):
        raise errors.bad_request(f"{place} must be a regex", place, "invalid_value")
    return {place: lambda: writing.regex(value)}


def of_schema(
    type: str, schema: dict[str, Any] | str | None, strict: bool | None, field: str, place: str
) -> GrammarWriters:
    """Return the grammar writer for a format. place: the body's path of the schema. Raises ApiError 400."""
    if type == "text":
        return {}
    if type == "json_object":
        return {field: any_object}
    if schema is None:
        raise errors.bad_request(f"{place} is required", place, "missing_required_parameter")
    return {place: lambda: writing.json_schema(schema, bool(strict))}


def of_kinds(
    json: dict[str, Any] | str | None,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
    names: Mapping[str, str],
) -> GrammarWriters:
    """Return the grammar writers for the constraints that are not None. names: field names by kind of constraint."""
    writers: GrammarWriters = {}
    if json is not None:
        writers["json"] = lambda: writing.json_schema(json)
    if regex is not None:
        writers["regex"] = lambda: writing.regex(regex)
    if choice is not None:
        writers["choice"] = lambda: writing.choice(choice)
    if grammar is not None:
        writers["grammar"] = lambda: writing.grammar(grammar)
    return {names[kind]: write for kind, write in writers.items()}


def named(prefix: str) -> dict[str, str]:
    """Return the names of the fields with this prefix, by kind of constraint, as `of_kinds` needs them."""
    return {kind: f"{prefix}{kind}" for kind in ("json", "regex", "choice", "grammar")}


def any_object() -> str:
    return writing.json_schema(writing.ANY_OBJECT)


def write_one(writers: GrammarWriters) -> str:
    """Return the grammar that all fields ask for: clients send it under an older name too.

    Raises ApiError 400 if a grammar is wrong, or if the fields ask for different ones.
    """
    texts: dict[str, str] = {}
    for field, write in writers.items():
        try:
            texts[field] = write()
        except GrammarError as error:
            raise errors.bad_request(f"{field}: {error}", field, "invalid_value") from None
    field, text = next(iter(texts.items()))
    if any(other != text for other in texts.values()):
        message = f"give only one of {' and '.join(writers)}: they ask for different outputs"
        raise errors.bad_request(message, field, "mutually_exclusive_parameters")
    return text


class GrammarCompiler:
    """A compiler for the grammars of requests.

    Each compilation has a thread of its own, because its native code cannot be interrupted. A compilation that takes
    too long is abandoned, but counts towards MOST_AT_ONCE until it ends.
    """

    def __init__(self, grammars: Grammars | None, problem: str = "", most_seconds: float = MOST_SECONDS) -> None:
        """problem: why outputs of this model cannot follow a grammar, if `grammars` is None."""
        self.grammars = grammars
        self._problem, self._most_seconds = problem, most_seconds
        self._free = asyncio.Semaphore(MOST_AT_ONCE)

    def hold(self, grammar: str) -> CompiledGrammar | None:
        """Return a handle that keeps the grammar compiled while it is referenced."""
        return self.grammars.known(grammar) if grammar and self.grammars is not None else None

    async def written(self, writers: GrammarWriters) -> str:
        """Compile the grammar that all writers return, and return its text; "" without writers.

        Raises ApiError: 400, 503.
        """
        if not writers:
            return ""
        return await self.compiled(lambda: write_one(writers), next(iter(writers)))

    async def compiled(self, write: Callable[[], str], field: str, tools: GrammarsOfTools = NO_TOOLS) -> str:
        """Call `write` for the text of a grammar, compile the grammar, and return the text.

        tools: the grammars of tools' parameters, which are parts of it. If one of them is wrong, the error names the
        tool. Raises ApiError 400, which names the field, or 503 if other compilations take too long.
        """
        if self.grammars is None:
            raise errors.bad_request(f"{field}: {self._problem}", field, "unsupported_parameter")
        grammars = self.grammars

        def work() -> str:
            text = write()
            try:
                grammars.compile(text)
            except GrammarError:
                check_tools(grammars, tools)
                raise
            return text

        try:
            async with asyncio.timeout(self._most_seconds):
                await self._free.acquire()
        except TimeoutError:
            raise busy() from None
        try:
            thread = OwnThread("grammar", work, self._free.release)
        except RuntimeError:  # The system allows no more threads.
            self._free.release()
            raise busy() from None
        try:
            return await self._in_time(thread, field)
        except GrammarError as error:
            raise errors.bad_request(f"{field}: {error}", field, "invalid_value") from None

    async def _in_time(self, thread: OwnThread[str], field: str) -> str:
        """Return the result of a compilation's thread.

        Raises ApiError: 400 if the compilation uses too much processor time, 503 if it is given too little of it.
        """
        for _ in range(MOST_WAITS):
            if await thread.ends_within(self._most_seconds):
                return thread.result()
            if thread.processor_seconds() >= self._most_seconds:
                message = f"{field}: too complex: it did not compile within {self._most_seconds:g} s"
                raise errors.bad_request(message, field, "invalid_value")
        raise busy()


def busy() -> errors.ApiError:
    return errors.unavailable("the compiler of grammars is busy: try again", "grammars_busy")


def check_tools(grammars: Grammars, tools: GrammarsOfTools) -> None:
    """Raise ApiError 400 if the grammar of a tool's parameters is wrong by itself."""
    for name, write in tools.items():
        try:
            grammars.check(write())
        except GrammarError as error:
            message = f"tools: the parameters of {name!r}: {error}"
            raise errors.bad_request(message, "tools", "invalid_value") from None


def no_grammars() -> GrammarCompiler:
    """Return a compiler that refuses every grammar."""
    return GrammarCompiler(None, "this model's outputs cannot follow a grammar")
