"""The official OpenAI client against the api, and the raw events of streams."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from baton.actors.messages import Submit
from baton.actors.tokens import unpack
from baton.api.generation import request_builder
from tests.api.fake_ring import EOS, Served, payloads, read_events, serving

pytestmark = pytest.mark.anyio
HELLO: Any = [{"role": "user", "content": "Hi"}]
PROMPT = b"user:Hi\nassistant:"


@asynccontextmanager
async def client(**options: Any) -> AsyncIterator[tuple[openai.AsyncOpenAI, Served]]:
    async with (
        serving(**options) as served,
        openai.AsyncOpenAI(base_url=f"{served.url}v1", api_key="none", max_retries=0) as api,
    ):
        yield api, served


async def test_a_chat_answer() -> None:
    async with client() as (api, served):
        served.ring.cached = 4
        answer = await api.chat.completions.create(model="fake", messages=HELLO, temperature=0, seed=7)
        [request] = served.ring.submitted()
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Hello, wörld.", "stop")
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert answer.usage.completion_tokens == len("Hello, wörld.".encode()) + 1
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    assert answer._request_id is not None and answer._request_id.startswith("req-")
    assert request.id == answer.id
    assert bytes(unpack(request.tokens)) == PROMPT
    assert request.message_ends == (len(b"user:Hi\n"),)
    assert (request.sampling.seed, request.sampling.temperature) == (7, 0.0)
    assert request.stops.token_ids == (EOS,)
    assert request.stops.max_tokens == 256 - len(PROMPT)


async def test_a_chat_stream() -> None:
    async with client() as (api, _):
        stream = await api.chat.completions.create(
            model="fake", messages=HELLO, stream=True, stream_options={"include_usage": True}, n=2
        )
        chunks = [chunk async for chunk in stream]
    assert [c.choices[0].delta.role for c in chunks[:2]] == ["assistant", "assistant"]
    for index in (0, 1):
        own = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        assert "".join(c.delta.content or "" for c in own) == "Hello, wörld."
        assert [c.finish_reason for c in own if c.finish_reason] == ["stop"]
        assert own[-1].finish_reason == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 2 * (len("Hello, wörld.".encode()) + 1)
    assert chunks[-1].usage.prompt_tokens == len(PROMPT)
    assert all(c.usage is None for c in chunks[:-1])


async def test_raw_events_of_a_chat() -> None:
    async with serving() as served:
        body = {"model": "fake", "messages": HELLO, "stream": True}
        async with served.client.post("/v1/chat/completions", json=body) as response:
            assert response.status == 200
            assert response.headers["x-request-id"]
            chunks = payloads(await read_events(response))
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert len({c["id"] for c in chunks}) == 1
    assert "usage" not in chunks[0]
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_n_choices_have_seeds_of_their_own() -> None:
    async with client() as (api, served):
        answer = await api.chat.completions.create(model="fake", messages=HELLO, n=3, seed=40)
        again = await api.chat.completions.create(model="fake", messages=HELLO, n=2)
        seeds = [request.sampling.seed for request in served.ring.submitted()]
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert seeds[:3] == [40, 41, 42]
    assert len(set(seeds[3:])) == 2
    assert again.usage is not None and again.usage.prompt_tokens == len(PROMPT)


async def test_chat_logprobs() -> None:
    async with client() as (api, served):
        answer = await api.chat.completions.create(
            model="fake", messages=HELLO, logprobs=True, top_logprobs=2, max_tokens=1
        )
        served.ring.reply = "ö"
        half = await api.chat.completions.create(model="fake", messages=HELLO, logprobs=True, max_tokens=1)
    [choice] = answer.choices
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None and choice.logprobs.content is not None
    [token] = choice.logprobs.content
    assert (token.token, token.logprob, token.bytes) == ("H", -0.5, [72])
    assert [(t.token, t.logprob) for t in token.top_logprobs] == [("H", -0.5), ("I", -9999.0)]
    assert half.choices[0].logprobs is not None and half.choices[0].logprobs.content is not None
    assert half.choices[0].logprobs.content[0].bytes == [195], "a part of a character"


async def test_completions() -> None:
    async with client() as (api, served):
        answer = await api.completions.create(model="fake", prompt=["one", "three"], n=2, max_tokens=5)
        listed = await api.completions.create(model="fake", prompt=[[104, 105], [33]], max_tokens=5)
        prompts = [bytes(unpack(r.tokens)) for r in served.ring.submitted()]
    assert [c.text for c in answer.choices] == ["Hello"] * 4
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert prompts == [b"one", b"one", b"three", b"three", b"hi", b"!"]
    assert answer.usage is not None and listed.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (8, 20)
    assert listed.usage.prompt_tokens == 3


async def test_a_completion_stream() -> None:
    async with client() as (api, _):
        stream = await api.completions.create(model="fake", prompt="x", stream=True, stop=["never"], echo=True)
        chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].text for c in chunks) == "xHello, wörld."
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_completion_logprobs_with_echo() -> None:
    async with client() as (api, _):
        answer = await api.completions.create(model="fake", prompt="ab", echo=True, logprobs=1, max_tokens=2)
        scored = await api.completions.create(model="fake", prompt="ab", echo=True, logprobs=1, max_tokens=0)
        streamed = await api.completions.create(
            model="fake", prompt="ab", echo=True, logprobs=1, max_tokens=2, stream=True
        )
        parts = [chunk.choices[0] async for chunk in streamed]
    [choice] = answer.choices
    assert choice.text == "abHe"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["a", "b", "H", "e"]
    assert choice.logprobs.token_logprobs == [None, -1.5, -0.5, -0.5]
    assert choice.logprobs.text_offset == [0, 1, 2, 3]
    assert choice.logprobs.top_logprobs == [None, {"b": -1.5}, {"H": -0.5}, {"e": -0.5}]
    [score] = scored.choices
    assert (score.text, score.finish_reason) == ("ab", "length")
    assert score.logprobs is not None and score.logprobs.tokens == ["a", "b"]
    assert scored.usage is not None and scored.usage.completion_tokens == 0
    assert "".join(p.text for p in parts) == "abHe"
    assert [t for p in parts if p.logprobs for t in p.logprobs.tokens or []] == ["a", "b", "H", "e"]
    assert [o for p in parts if p.logprobs for o in p.logprobs.text_offset or []] == [0, 1, 2, 3]


async def test_sampling_fields_reach_the_ring() -> None:
    async with client() as (api, served):
        served.server.model.text.generation_defaults = {"temperature": 0.7, "top_k": 20}
        await api.chat.completions.create(
            model="fake",
            messages=HELLO,
            max_completion_tokens=9,
            stop=["\n", "END"],
            top_p=0.9,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={"65": 2},
            user="me",
            metadata={"a": "b"},
            extra_body={
                "min_tokens": 2, "ignore_eos": True, "top_k": -1, "min_p": 0.1, "repetition_penalty": 1.1,
                "priority": 3, "cache_salt": "tenant", "stop_token_ids": [5], "tools": [], "tool_choice": "none",
                "response_format": {"type": "text"}, "store": False, "seed": -1,
            },
        )  # fmt: skip
        [request] = served.ring.submitted()
    sampling, stops = request.sampling, request.stops
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.7, 0, 0.9, 0.1)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.1, 0.5, -0.5)
    assert sampling.logit_bias == {65: 2.0}
    assert 0 <= sampling.seed < 2**63
    assert (stops.max_tokens, stops.min_tokens, stops.strings, stops.token_ids) == (9, 2, ("\n", "END"), (5,))
    assert (request.priority, request.salt) == (3, "tenant")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HELLO, "n": 3, "seed": 5, "stop_token_ids": [7]}),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 3, "seed": 5, "stop_token_ids": [7]}),
        ("/generate", {"text": ["a", "b"], "sampling_params": {"n": 3, "seed": 5, "stop_token_ids": [7]}}),
    ],
)
async def test_choices_differ_in_their_seeds_and_share_the_rest(
    monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """Stop tokens and biases can be millions of numbers, so they are read once for all prompts and choices."""
    calls, stops = list[int](), request_builder.stops
    monkeypatch.setattr(request_builder, "stops", lambda *arguments: calls.append(1) or stops(*arguments))
    async with client() as (_, served):
        assert (await served.post(path, body))[0] == 200
        requests = served.ring.submitted()
    assert [request.sampling.seed for request in requests] == [5, 6, 7] * (len(requests) // 3) and calls == [1]
    assert len({request.id for request in requests}) == len(requests)
    assert all(request.stops.token_ids[0] == 7 for request in requests)


async def test_generation_config_sets_the_default_length() -> None:
    async with client() as (api, served):
        served.server.model.text.generation_defaults = {"max_new_tokens": 3}
        answer = await api.chat.completions.create(model="fake", messages=HELLO)
        assert answer.choices[0].message.content == "Hel"


async def test_parts_and_roles() -> None:
    async with client() as (api, served):
        await api.chat.completions.create(
            model="fake",
            messages=[
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": "c", "refusal": None},
                {"role": "user", "content": "d"},
            ],
        )
        [request] = served.ring.submitted()
    assert bytes(unpack(request.tokens)) == b"system:Be brief.\nuser:ab\nassistant:c\nuser:d\nassistant:"


async def test_errors_become_the_clients_exceptions() -> None:
    async with client(api_key=("right",)) as (api, _):
        with pytest.raises(openai.AuthenticationError):
            await api.models.list()
    async with client() as (api, served):
        with pytest.raises(openai.NotFoundError) as missing:
            await api.chat.completions.create(model="gpt-9", messages=HELLO)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as wrong:
            await api.chat.completions.create(model="fake", messages=HELLO, temperature=-1)
        assert (wrong.value.param, wrong.value.type) == ("temperature", "invalid_request_error")
        served.ring.refusal = "queue_full"
        with pytest.raises(openai.RateLimitError) as full:
            await api.chat.completions.create(model="fake", messages=HELLO, stream=True)
        assert full.value.response.headers["retry-after"] == "1"
        assert len(served.ring.submitted()) == 1


async def test_an_error_in_mid_stream_is_an_event() -> None:
    async with client(request_timeout=0.3) as (api, served):
        served.ring.pause = 0.05
        stream = await api.chat.completions.create(model="fake", messages=HELLO, stream=True)
        assert (await anext(stream)).choices[0].delta.role == "assistant"
        with pytest.raises(openai.APIError) as caught:
            async for _ in stream:
                pass
        assert caught.value.code == "request_timeout"


async def test_models() -> None:
    async with client(max_model_len=99) as (api, _):
        [model] = (await api.models.list()).data
        assert model.id == "fake" and model.model_extra is not None and model.model_extra["max_model_len"] == 99
        assert (await api.models.retrieve("fake")).id == "fake"
        with pytest.raises(openai.NotFoundError):
            await api.models.retrieve("other/model")


async def test_pings_are_comments() -> None:
    async with serving(ping_interval=0.02) as served:
        served.ring.pause = 0.05
        served.ring.reply = "ab"
        body = {"model": "fake", "messages": HELLO, "stream": True}
        async with served.client.post("/v1/chat/completions", json=body) as response:
            blocks = await read_events(response)
    assert b": ping" in blocks
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in payloads(blocks))
    assert text == "ab"


async def test_a_client_that_goes_away_aborts() -> None:
    for stream in (True, False):
        async with serving() as served:
            served.ring.held = True
            body = json.dumps({"model": "fake", "messages": HELLO, "stream": stream}).encode()
            await cut_off(served, body)
            [id] = served.ring.aborted()
            [submitted] = [m.request.id for m in served.ring.sent if isinstance(m, Submit)]
            assert id == submitted
            assert served.server.gateway.open_requests == 0


async def cut_off(served: Served, body: bytes) -> None:
    """Send a request over a plain socket, and close the socket once the ring has the request."""
    port = served.client.port
    assert port is not None
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await served.ring.until(served.ring.submitted)
    writer.close()
    await writer.wait_closed()
    await served.ring.until(served.ring.aborted)


async def test_a_client_that_stops_reading_is_cut_off() -> None:
    async with serving(max_model_len=100_000, unread_timeout=0.2) as served:
        served.ring.reply = "x" * 60_000
        body = json.dumps({"messages": HELLO, "stream": True, "logprobs": True, "top_logprobs": 2}).encode()
        assert served.client.port is not None
        _unread, writer = await asyncio.open_connection("127.0.0.1", served.client.port, limit=1024)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await served.ring.until(served.ring.aborted)
        assert served.server.gateway.open_requests == 0
        writer.close()


async def test_how_a_prompt_ends() -> None:
    chat = [*HELLO, {"role": "assistant", "content": "Hel"}]
    begun = b"user:Hi\nassistant:Hel"
    ways: list[tuple[dict[str, Any], bytes]] = [
        ({}, begun + b"\nassistant:"),
        ({"add_generation_prompt": True, "continue_final_message": False}, begun + b"\nassistant:"),
        ({"add_generation_prompt": False}, begun + b"\n"),
        ({"continue_final_message": True}, begun),
        ({"add_generation_prompt": False, "continue_final_message": True}, begun),
    ]
    async with serving() as served:
        for fields, prompt in ways:
            assert (await served.post("/v1/chat/completions", {"messages": chat, **fields}))[0] == 200
            assert bytes(unpack(served.ring.submitted()[-1].tokens)) == prompt
            assert (await served.post("/tokenize", {"messages": chat, **fields}))[1]["tokens"] == list(prompt)
        for path in ("/v1/chat/completions", "/tokenize"):
            both = {"messages": chat, "add_generation_prompt": True, "continue_final_message": True}
            status, error = await served.error(path, both)
            assert (status, error["param"]) == (400, "continue_final_message")
            for reserved in ("continue_final_message", "beginnings", "salt"):
                hidden = {"messages": chat, "chat_template_kwargs": {reserved: True}}
                assert (await served.error(path, hidden))[0] == 400
