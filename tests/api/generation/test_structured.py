"""Structured output: every form of a constraint reaches the ring as the same grammar, or is a 400."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.api.errors import ApiError
from baton.api.generation.structured import MOST_AT_ONCE, GrammarCompiler
from baton.models.text.grammars.errors import GrammarError
from baton.models.text.grammars.writing import choice, grammar, json_schema, regex
from baton.models.text.tokenizer import load_text
from tests.api.fake_ring import EOS, Served, serving

pytestmark = pytest.mark.anyio

TEXT = load_text(Path(__file__).parents[3] / "models" / "bundled")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}
TEXT_FORMAT = {"type": "json_schema", "name": "s", "schema": SCHEMA, "strict": True}
ANY_OBJECT = json_schema({"type": "object"})
LARK = 'start: "a"+'
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "a schema": ({"response_format": FORMAT}, json_schema(SCHEMA)),
    "a schema that is not strict": (
        {"response_format": {**FORMAT, "json_schema": {"name": "s", "schema": SCHEMA}}},
        json_schema(SCHEMA, strict=False),
    ),
    "any object": ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
    "an object with a schema": (
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        json_schema(SCHEMA, strict=False),
    ),
    "an object with Hugging Face's schema": (
        {"response_format": {"type": "json_object", "value": SCHEMA}},
        json_schema(SCHEMA, strict=False),
    ),
    "Hugging Face's schema": (
        {"response_format": {"type": "json", "value": SCHEMA}},
        json_schema(SCHEMA, strict=False),
    ),
    "Hugging Face's schema as text": (
        {"response_format": {"type": "json", "value": json.dumps(SCHEMA)}},
        json_schema(SCHEMA, strict=False),
    ),
    "Hugging Face's regex": ({"response_format": {"type": "regex", "value": "a+"}}, regex("a+")),
    "text": ({"response_format": {"type": "text"}}, ""),
    "guided_json": ({"guided_json": SCHEMA, "guided_decoding_backend": "xgrammar"}, json_schema(SCHEMA)),
    "guided_regex": ({"guided_regex": "a+"}, regex("a+")),
    "guided_choice": ({"guided_choice": ["a", "b"]}, choice(["a", "b"])),
    "guided_grammar": ({"guided_grammar": LARK}, grammar(LARK)),
    "SGLang's schema": ({"json_schema": SCHEMA}, json_schema(SCHEMA)),
    "SGLang's schema as text": ({"json_schema": json.dumps(SCHEMA)}, json_schema(SCHEMA)),
    "SGLang's regex": ({"regex": "a+"}, regex("a+")),
    "SGLang's ebnf": ({"ebnf": LARK}, grammar(LARK)),
    "new and old": ({"structured_outputs": {"grammar": LARK}, "guided_grammar": LARK}, grammar(LARK)),
    "old and SGLang's": ({"guided_regex": "a+", "regex": "a+", "structured_outputs": {"regex": "a+"}}, regex("a+")),
    "a schema and its text": (
        {"structured_outputs": {"json": SCHEMA}, "guided_json": json.dumps(SCHEMA)},
        json_schema(SCHEMA),
    ),
    "strict and old": ({"response_format": FORMAT, "guided_json": SCHEMA}, json_schema(SCHEMA)),
    "json": ({"structured_outputs": {"json": SCHEMA, "disable_fallback": True}}, json_schema(SCHEMA)),
    "regex": ({"structured_outputs": {"regex": "a+"}}, regex("a+")),
    "choice": ({"structured_outputs": {"choice": ["a", "b"]}}, choice(["a", "b"])),
    "grammar": ({"structured_outputs": {"grammar": LARK}}, grammar(LARK)),
    "json_object": ({"structured_outputs": {"json_object": True}}, ANY_OBJECT),
    "none": ({"structured_outputs": {}, "response_format": None}, ""),
}
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/completions": {"prompt": "a"},
    "/v1/sessions/s/turns": {"text": "a"},
}
OTHERS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/responses", {"input": "a", "text": {"format": TEXT_FORMAT, "verbosity": "low"}}, json_schema(SCHEMA)),
    ("/v1/responses", {"input": "a", "text": {"format": {"type": "json_object"}}}, ANY_OBJECT),
    ("/v1/responses", {"input": "a", "text": {"format": {"type": "text"}}}, ""),
    ("/generate", {"text": "a", "sampling_params": {"json_schema": '{"type": "object"}'}}, ANY_OBJECT),
    ("/generate", {"text": "a", "sampling_params": {"regex": "a+"}}, regex("a+")),
    ("/generate", {"text": "a", "sampling_params": {"ebnf": LARK}}, grammar(LARK)),
]


@asynccontextmanager
async def serving_grammars() -> AsyncIterator[Served]:
    async with serving() as served:
        model = served.server.ready()
        served.server.model = replace(model, grammars=GrammarCompiler(TEXT.grammars(model.vocab_size)))
        await served.post("/v1/sessions", {"id": "s"})
        yield served


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", PATHS)
async def test_each_form_reaches_the_ring(path: str, kind: str) -> None:
    fields, expected = KINDS[kind]
    async with serving_grammars() as served:
        status, answer = await served.post(path, PATHS[path] | fields)
        assert status == 200, answer
        [request] = served.ring.submitted()
    assert request.grammar == expected and EOS in request.stops.token_ids


@pytest.mark.parametrize(("path", "body", "expected"), OTHERS)
async def test_the_fields_of_other_protocols_reach_the_ring(path: str, body: dict[str, Any], expected: str) -> None:
    async with serving_grammars() as served:
        status, answer = await served.post(path, body)
        assert status == 200, answer
        [request] = served.ring.submitted()
    assert request.grammar == expected
    if "text" in body and path == "/v1/responses":
        assert answer["text"] == {"format": body["text"]["format"]}


async def test_a_batch_with_a_regex_for_each() -> None:
    async with serving_grammars() as served:
        params = [{"regex": "a"}, {"regex": "b"}, {}]
        status, answer = await served.post("/generate", {"text": ["a", "b", "c"], "sampling_params": params})
        assert status == 200, answer
        assert [request.grammar for request in served.ring.submitted()] == [regex("a"), regex("b"), ""]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"response_format": {"type": "json_schema"}}, "response_format"),
    ("/v1/chat/completions", {"response_format": {"type": "xml"}}, "response_format.type"),
    ("/v1/chat/completions", {"response_format": {"type": "json_object", "shema": {}}}, "response_format.shema"),
    (
        "/v1/chat/completions",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s"}}},
        "response_format.json_schema.schema",
    ),
    *(
        ("/v1/chat/completions", {"response_format": format}, "response_format.value")
        for format in (
            {"type": "json_object", "value": SCHEMA, "schema": SCHEMA},
            {"type": "json"},
            {"type": "json", "value": "["},
            {"type": "json", "value": {"type": "objekt"}},
            {"type": "json", "value": [1]},
            {"type": "regex"},
            {"type": "regex", "value": SCHEMA},
            {"type": "regex", "value": "("},
            {"type": "text", "value": SCHEMA},
            {**FORMAT, "value": SCHEMA},
        )
    ),
    ("/v1/chat/completions", {"guided_json": "["}, "guided_json"),
    ("/v1/chat/completions", {"guided_json": {"type": "objekt"}}, "guided_json"),
    ("/v1/chat/completions", {"guided_regex": "("}, "guided_regex"),
    ("/v1/chat/completions", {"guided_choice": []}, "guided_choice"),
    ("/v1/chat/completions", {"guided_grammar": "root ::= ("}, "guided_grammar"),
    ("/v1/chat/completions", {"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex"),
    ("/v1/chat/completions", {"guided_regex": "a", "response_format": FORMAT}, "response_format.json_schema.schema"),
    ("/v1/chat/completions", {"guided_regex": "a", "regex": "b"}, "guided_regex"),
    (
        "/v1/chat/completions",
        {"structured_outputs": {"grammar": LARK}, "ebnf": 'start: "b"'},
        "structured_outputs.grammar",
    ),
    ("/v1/chat/completions", {"guided_regex": "a", "regex": "("}, "guided_regex"),
    ("/v1/chat/completions", {"guided_grammar": LARK, "ebnf": "root ::= ("}, "ebnf"),
    ("/v1/completions", {"ebnf": "root ::= ("}, "ebnf"),
    ("/v1/chat/completions", {"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ("/v1/completions", {"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ("/v1/sessions/s/turns", {"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ("/v1/responses", {"input": "a", "text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ("/v1/responses", {"input": "a", "text": {"format": {"type": "xml"}}}, "text.format.type"),
    ("/v1/responses", {"input": "a", "text": {"verbosity": "loud"}}, "text.verbosity"),
    ("/generate", {"text": "a", "sampling_params": {"regex": "("}}, "sampling_params.regex"),
    (
        "/generate",
        {"text": ["a", "b"], "sampling_params": [{}, {"json_schema": "{"}]},
        "sampling_params[1].json_schema",
    ),
]


@pytest.mark.parametrize(("path", "fields", "param"), REFUSED)
async def test_a_wrong_grammar_is_a_400_that_names_the_field(path: str, fields: dict[str, Any], param: str) -> None:
    async with serving_grammars() as served:
        status, answer = await served.post(path, PATHS.get(path, {}) | fields)
        assert not served.ring.submitted()
    assert status == 400 and answer["error"]["param"] == param, answer


async def test_a_model_without_grammars_refuses_constraints() -> None:
    async with serving() as served:
        body = PATHS["/v1/completions"] | {"guided_regex": "a"}
        status, answer = await served.post("/v1/completions", body)
    assert status == 400 and "cannot follow a grammar" in answer["error"]["message"]


async def test_slow_grammars_get_400_and_the_next_gets_503() -> None:
    """A compilation that timed out gets a 400, but cannot be ended. While all threads compile, others get a 503."""
    compiler, ended = GrammarCompiler(TEXT.grammars(300), most_seconds=0.2), threading.Event()

    def slow() -> str:
        while not ended.is_set():  # Computes, so that its thread uses processor time.
            pass
        return 'start: "a"'

    try:
        statuses = [await refused(compiler, slow) for _ in range(MOST_AT_ONCE + 1)]
    finally:
        ended.set()
    assert statuses == [400] * MOST_AT_ONCE + [503]
    while True:
        try:
            assert await compiler.compiled(lambda: 'start: "b"', "regex") == 'start: "b"'
            break
        except ApiError:
            await asyncio.sleep(0.01)


async def test_a_compilation_without_processor_time_is_not_too_complex() -> None:
    """On a busy machine a small grammar's thread may wait for longer than the limit."""
    compiler, ended = GrammarCompiler(TEXT.grammars(300), most_seconds=0.5), threading.Event()

    def waits() -> str:
        ended.wait(60)
        return 'start: "a"'

    compiling = asyncio.ensure_future(compiler.compiled(waits, "regex"))
    await asyncio.sleep(0.6)
    ended.set()
    assert await compiling == 'start: "a"'


async def test_a_compilation_that_gets_no_processor_time_for_long_is_a_503() -> None:
    compiler, ended = GrammarCompiler(TEXT.grammars(300), most_seconds=0.02), threading.Event()
    try:
        assert await refused(compiler, lambda: str(ended.wait(60))) == 503
    finally:
        ended.set()


async def test_a_system_without_threads_is_a_503_and_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    compiler = GrammarCompiler(TEXT.grammars(300))
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", refuse)
        assert [await refused(compiler, lambda: 'start: "a"') for _ in range(3)] == [503] * 3
    assert await compiler.compiled(lambda: 'start: "a"', "regex") == 'start: "a"'


async def refused(compiler: GrammarCompiler, write: Callable[[], str]) -> int:
    """Return the status with which a grammar is refused, and check the message."""
    with pytest.raises(ApiError, match=r"did not compile within 0\.2 s|the compiler of grammars is busy") as caught:
        await compiler.compiled(write, "regex")
    return caught.value.status


async def test_an_internal_error_of_the_compiler_is_not_a_400() -> None:
    def broken() -> str:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await GrammarCompiler(TEXT.grammars(300)).compiled(broken, "regex")


async def test_an_open_request_keeps_its_grammar_compiled() -> None:
    async with serving_grammars() as served:
        compiler = served.server.ready().grammars
        held: list[str] = []
        served.server.gateway.hold_grammar = lambda grammar: held.append(grammar) or compiler.hold(grammar)
        served.ring.held = True
        post = asyncio.ensure_future(served.post("/v1/completions", {"prompt": "a", "guided_regex": "a+"}))
        await served.ring.until(served.ring.submitted)
        assert compiler.grammars is not None and held == [regex("a+")]
        [member] = served.server.gateway._open.values()
        assert member.grammar is compiler.grammars.known(regex("a+")) is not None
        served.ring.release()
        await post
    assert compiler.hold("") is None


def test_matchers_accept_what_their_grammars_allow() -> None:
    with pytest.raises(GrammarError):
        TEXT.grammars(300).matcher("start: missing")
