"""What clients may ask the output to follow, in the words of OpenAI, vLLM and SGLang; compiled off the event loop."""

import asyncio
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal

from msgspec import Struct, ValidationError, convert

from baton.api import errors
from baton.api.generation.fields import RequestFields
from baton.api.parsing import invalid
from baton.models.text.grammars import writing
from baton.models.text.grammars.compiling import CompiledGrammar, Grammars
from baton.models.text.grammars.matcher import GrammarError

# Seconds that a client waits for its grammar, and how many are compiled at once.
MOST_SECONDS = 1.0
MOST_AT_ONCE = 2


class JsonSchemaFormat(Struct):
    """OpenAI's: the schema, and whether what of it cannot be held is an error."""

    name: str = ""
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True):
    """schema: where it stands beside the type json_object, as llama.cpp's and Together's clients send it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema: dict[str, Any] | None = None


class TextFormat(Struct):
    """The same in Responses, where the schema's fields stand beside the type."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = ""
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """vLLM's: one of these. disable_fallback, disable_any_whitespace: taken, and without effect."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None


class StructuredFields(RequestFields, forbid_unknown_fields=True, kw_only=True):
    """What chat completions, completions and turns may ask for: one of these at most.

    guided_decoding_backend: taken, and without effect.
    """

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None


# What writes a grammar, by the field that asked for it.
Wanted = dict[str, Callable[[], str]]


def wanted_in(asked: StructuredFields) -> Wanted:
    wanted = of_format(asked.response_format, "response_format")
    if (given := asked.structured_outputs) is not None:
        wanted |= of_kinds(given.json, given.regex, given.choice, given.grammar, named("structured_outputs."))
        if given.json_object:
            wanted["structured_outputs.json_object"] = any_object
    kinds = asked.guided_json, asked.guided_regex, asked.guided_choice, asked.guided_grammar
    return wanted | of_kinds(*kinds, named("guided_"))


def of_format(format: ResponseFormat | None, field: str) -> Wanted:
    if format is None:
        return {}
    if format.type == "json_schema" and format.json_schema is None:
        raise errors.bad_request(f"{field}.json_schema is required", field, "missing_required_parameter")
    if format.type == "json_object" and format.schema is not None:
        return of_schema("json_schema", format.schema, None, field, f"{field}.schema")
    given = format.json_schema or JsonSchemaFormat()
    return of_schema(format.type, given.schema, given.strict, field, f"{field}.json_schema.schema")


def of_text(format: Mapping[str, Any], field: str) -> Wanted:
    """Of Responses' text.format. Raises ApiError 400."""
    try:
        given = convert(format, TextFormat)
    except ValidationError as error:
        raise invalid(str(error), field) from None
    return of_schema(given.type, given.schema, given.strict, field, f"{field}.schema")


def of_schema(type: str, schema: dict[str, Any] | None, strict: bool | None, field: str, place: str) -> Wanted:
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
) -> Wanted:
    """names: of the fields, by kind."""
    wanted: Wanted = {}
    if json is not None:
        wanted["json"] = lambda: writing.json_schema(json)
    if regex is not None:
        wanted["regex"] = lambda: writing.regex(regex)
    if choice is not None:
        wanted["choice"] = lambda: writing.choice(choice)
    if grammar is not None:
        wanted["grammar"] = lambda: writing.grammar(grammar)
    return {names[kind]: write for kind, write in wanted.items()}


def named(prefix: str) -> dict[str, str]:
    return {kind: f"{prefix}{kind}" for kind in ("json", "regex", "choice", "grammar")}


def any_object() -> str:
    return writing.json_schema(writing.ANY_OBJECT)


def check_one(wanted: Wanted) -> str:
    """The field that asks. Raises ApiError 400 for several."""
    field, *others = wanted
    if others:
        raise errors.bad_request(f"give one of {' and '.join(wanted)}", field, "mutually_exclusive_parameters")
    return field


class GrammarCompiler:
    """Compiles what clients ask for, each in a thread of its own: native code cannot be ended, only left alone.

    problem: why the model's outputs can follow no grammar, where `grammars` is None.
    """

    def __init__(self, grammars: Grammars | None, problem: str = "", most_seconds: float = MOST_SECONDS) -> None:
        self.grammars = grammars
        self._problem, self._most_seconds = problem, most_seconds
        self._free = asyncio.Semaphore(MOST_AT_ONCE)

    def hold(self, grammar: str) -> CompiledGrammar | None:
        """What keeps it compiled, as long as it is held."""
        return self.grammars.known(grammar) if grammar and self.grammars is not None else None

    async def written(self, wanted: Wanted) -> str:
        """The grammar that is wanted, compiled; empty if none is. Raises ApiError 400 naming the field."""
        if not wanted:
            return ""
        field = check_one(wanted)
        return await self.compiled(wanted[field], field)

    async def compiled(self, write: Callable[[], str], field: str) -> str:
        """What `write` writes, compiled. Raises ApiError: 400 naming the field, 503 where others take too long."""
        if self.grammars is None:
            raise errors.bad_request(f"{field}: {self._problem}", field, "unsupported_parameter")
        grammars = self.grammars

        def work() -> str:
            text = write()
            grammars.compile(text)
            return text

        try:
            async with asyncio.timeout(self._most_seconds):
                await self._free.acquire()
        except TimeoutError:
            raise errors.unavailable("other grammars are being compiled", "grammars_busy") from None
        try:
            async with asyncio.timeout(self._most_seconds):
                return await self._in_thread(work)
        except GrammarError as error:
            raise errors.bad_request(f"{field}: {error}", field, "invalid_value") from None
        except TimeoutError:
            message = f"{field}: it is not compiled within {self._most_seconds:g} s: it is too complex"
            raise errors.bad_request(message, field, "invalid_value") from None

    def _in_thread(self, work: Callable[[], str]) -> "asyncio.Future[str]":
        """Makes room for another when the work is done, whoever waits for it still."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[str] = loop.create_future()

        def end(result: str | None, error: BaseException | None) -> None:
            self._free.release()
            if done.cancelled():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result or "")

        def run() -> None:
            result, failed = None, None
            try:
                result = work()
            except BaseException as error:
                failed = error
            with suppress(RuntimeError):  # The loop is closed: nobody waits.
                loop.call_soon_threadsafe(end, result, failed)

        threading.Thread(target=run, name="grammar", daemon=True).start()
        return done


def no_grammars() -> GrammarCompiler:
    return GrammarCompiler(None, "this model's outputs cannot follow a grammar")
