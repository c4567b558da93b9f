"""All refusals with their status and the field that they name."""

import asyncio
import gzip
import json
import sys
from typing import Any

import brotli
import pytest

from baton.actors import tokens
from tests.api.fake_ring import serving

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = {"role": "user", "content": "Hi"}

REFUSED: list[tuple[str, dict[str, Any], str | None]] = [
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "Hi"}, "messages"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [USER, {"role": "wizard", "content": "x"}]}, "messages[1].role"),
    (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    (CHAT, {"messages": [{**USER, "content": 3}]}, "messages[0].content"),
    (CHAT, {"messages": [{**USER, "colour": "red"}]}, "messages[0].colour"),
    (CHAT, {"messages": [{**USER, "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content[0]"),
    (CHAT, {"messages": [{**USER, "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    (CHAT, {"messages": [{"role": "user", "content": "refuse me"}]}, "messages"),
    (
        CHAT,
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
        "messages[0].tool_calls[0].function",
    ),
    (CHAT, {"messages": [USER], "tools": [{"type": "function"}]}, "tools"),
    (CHAT, {"messages": [USER], "tool_choice": "required"}, "tool_choice"),
    (CHAT, {"messages": [USER], "response_format": {"type": "json_object"}}, "response_format"),
    (CHAT, {"messages": [USER], "modalities": ["text", "audio"]}, "modalities"),
    (CHAT, {"messages": [USER], "guided_regex": "a+"}, "guided_regex"),
    (CHAT, {"messages": [USER], "temperature": "hot"}, "temperature"),
    (CHAT, {"messages": [USER], "temperature": -0.1}, "temperature"),
    (CHAT, {"messages": [USER], "top_p": 0}, "top_p"),
    (CHAT, {"messages": [USER], "top_k": -2}, "top_k"),
    (CHAT, {"messages": [USER], "min_p": 1.5}, "min_p"),
    (CHAT, {"messages": [USER], "presence_penalty": 3}, "presence_penalty"),
    (CHAT, {"messages": [USER], "repetition_penalty": 0}, "repetition_penalty"),
    (CHAT, {"messages": [USER], "repetition_penalty": 1e-40}, "repetition_penalty"),
    (CHAT, {"messages": [USER], "logit_bias": {"260": 1}}, "logit_bias"),
    (CHAT, {"messages": [USER], "logit_bias": {"x": 1}}, "logit_bias"),
    (CHAT, {"messages": [USER], "logit_bias": {"0" * 19 + "260": 1}}, "logit_bias"),
    (CHAT, {"messages": [USER], "logit_bias": {"01": 1}}, "logit_bias"),
    (CHAT, {"messages": [USER], "logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    (CHAT, {"messages": [USER], "logit_bias": {"²": 1}}, "logit_bias"),
    (CHAT, {"messages": [USER], "logit_bias": {"1": 101}}, "logit_bias[...]"),
    (CHAT, {"messages": [USER], "max_tokens": 0}, "max_tokens"),
    (CHAT, {"messages": [USER], "max_tokens": 2, "min_tokens": 3}, "min_tokens"),
    (CHAT, {"messages": [USER], "min_tokens": 1, "stop_token_ids": [*range(260)]}, "min_tokens"),
    (CHAT, {"messages": [USER], "n": 0}, "n"),
    (CHAT, {"messages": [USER], "n": 129}, "n"),
    (CHAT, {"messages": [USER], "stop": [""]}, "stop"),
    (CHAT, {"messages": [USER], "stop": ["x"] * 65}, "stop"),
    (CHAT, {"messages": [USER], "stop_token_ids": [260]}, "stop_token_ids"),
    (CHAT, {"messages": [USER], "top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"messages": [USER], "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"messages": [USER], "stream": 1}, "stream"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 300}]}, "messages"),
    (TEXT, {}, "prompt"),
    (TEXT, {"prompt": ""}, "prompt"),
    (TEXT, {"prompt": []}, "prompt"),
    (TEXT, {"prompt": [1, "a"]}, "prompt"),
    (TEXT, {"prompt": [1, -1]}, "prompt"),
    (TEXT, {"prompt": [260]}, "prompt"),
    (TEXT, {"prompt": [True]}, "prompt"),
    (TEXT, {"prompt": [[1], []]}, "prompt"),
    (TEXT, {"prompt": "x" * 256}, "prompt"),
    (TEXT, {"prompt": "x", "suffix": "y"}, "suffix"),
    (TEXT, {"prompt": "x", "best_of": 3}, "best_of"),
    (TEXT, {"prompt": "x", "max_tokens": 0}, "max_tokens"),
    (TEXT, {"prompt": "x", "max_tokens": 10**30}, "max_tokens"),
    ("/generate", {}, "text"),
    ("/generate", {"text": "a", "input_ids": [1]}, "text"),
    ("/generate", {"text": []}, "text"),
    ("/generate", {"input_ids": [1.5]}, "input_ids"),
    ("/generate", {"input_ids": [[1], 2]}, "input_ids"),
    ("/generate", {"input_ids": [999]}, "input_ids"),
    ("/generate", {"text": "x" * 256}, "text"),
    ("/generate", {"text": "a", "session_params": {"id": "s"}}, "session_params.id"),
    ("/generate", {"text": "a", "colour": 1}, "colour"),
    ("/generate", {"text": "a", "sampling_params": {"regex": "a"}}, "sampling_params.regex"),
    ("/generate", {"text": "a", "sampling_params": {"colour": 1}}, "sampling_params.colour"),
    ("/generate", {"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
    ("/generate", {"text": ["a"], "sampling_params": [{"top_p": 2}]}, "sampling_params[0].top_p"),
    ("/generate", {"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
    ("/generate", {"text": ["a", "b"], "return_logprob": [True]}, "return_logprob"),
    ("/generate", {"text": "a", "rid": "has space"}, "rid"),
    ("/generate", {"text": "a", "rid": "line\n"}, "rid"),
    ("/generate", {"text": ["a", "b"], "rid": ["x", "x"]}, "rid"),
    ("/generate", {"text": "a", "return_logprob": True, "logprob_start_len": 2}, "logprob_start_len"),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": [USER]}, "prompt"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": [-5]}, "tokens"),
    ("/abort_request", {}, "rid"),
]


@pytest.mark.parametrize(("path", "body", "param"), REFUSED, ids=lambda value: None)
async def test_a_wrong_field_is_a_400_that_names_it(path: str, body: dict[str, Any], param: str) -> None:
    async with serving() as served:
        status, error = await served.error(path, body)
        assert (status, error["param"], error["type"]) == (400, param, "invalid_request_error"), error
        assert error["message"]
        assert served.ring.submitted() == []


LOOK, PICTURE = {"type": "text", "text": "Look:"}, [{"type": "input_image"}]
IMAGES: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"messages": [{**USER, "content": [LOOK, {"type": kind, kind: {}}]}]}, "messages[0].content[1]", kind)
    for kind in ("image", "image_url", "input_image", "video_url", "input_audio")
] + [
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]", "im"),
    ("/tokenize", {"messages": [{**USER, "content": PICTURE}]}, "messages[0].content[0]", "input_image"),
    ("/v1/conversations", {"items": [{**USER, "content": PICTURE}]}, "items[0].content[0]", "input_image"),
    ("/generate", {"text": "a", "image_data": ["x"]}, "image_data", "image_data"),
]


@pytest.mark.parametrize(("path", "body", "param", "named"), IMAGES)
async def test_fields_that_are_not_text_are_refused_by_name(
    path: str, body: dict[str, Any], param: str, named: str
) -> None:
    async with serving() as served:
        status, error = await served.error(path, body)
        assert (status, error["param"]) == (400, param) and named in error["message"], error


@pytest.mark.parametrize(
    "body", [b"{", b"[1]", b'"x"', b"\xff\xfe", b'{"messages": "\\ud800"}', b"[" * 5000, b'{"a": 1e999}']
)
async def test_a_body_that_is_not_a_json_object(body: bytes) -> None:
    async with serving() as served, served.client.post(CHAT, data=body) as response:
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("encoding", "body", "status", "code"),
    [
        ("gzip", b'{"prompt": "a"}', 400, "invalid_body"),
        ("deflate", b"\x78\x9c\x00\x11\x22\x33\x44", 400, "invalid_body"),
        ("br", b"\xff\xff\xff", 400, "invalid_body"),
        ("zstd", b'{"prompt": "a"}', 400, "invalid_body"),
        ("snappy", b'{"prompt": "a"}', 415, "unsupported_media_type"),
        ("gzip, gzip", gzip.compress(b"{}", mtime=0), 415, "unsupported_media_type"),
        ("gzip", gzip.compress(b'{"prompt": "a"}', mtime=0), 200, None),
        ("br", brotli.compress(b'{"prompt": "a"}'), 200, None),
        ("zstd", zstd.compress(b'{"prompt": "a"}'), 200, None),
    ],
)
async def test_a_packed_body(encoding: str, body: bytes, status: int, code: str | None) -> None:
    headers = {"Content-Encoding": encoding}
    async with serving() as served, served.client.post(TEXT, data=body, headers=headers) as response:
        assert response.status == status
        answer = await response.json()
        assert answer.get("error", {}).get("code") == code, answer


async def test_a_value_of_any_depth_is_refused() -> None:
    """Values nested at any depth get a 400, also where the parser accepts them but later recursive functions fail."""
    async with serving() as served:
        for depth in range(800, 1000):
            deep = "[" * depth + "]" * depth
            for message in (f'{{"role": {deep}}}', f'{{"role": "user", "content": [{{"type": {deep}}}]}}'):
                async with served.client.post(CHAT, data=f'{{"messages": [{message}]}}') as response:
                    assert response.status == 400, (depth, await response.text())


@pytest.mark.parametrize(("name", "status"), [("Host", 403), ("Origin", 403), ("Expect", 200), ("Accept", 200)])
async def test_a_header_that_is_not_text(name: str, status: int) -> None:
    async with serving() as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.client.port)
        host = b"" if name == "Host" else b"Host: localhost\r\n"
        own = host + name.encode() + b": \xff\xfe\r\nConnection: close\r\n\r\n"
        writer.write(b"GET /v1/models HTTP/1.1\r\n" + own)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    assert int(head.split()[1]) == status, head
    assert json.loads(body).get("error", {}).get("code") == ("forbidden" if status == 403 else None)


async def test_unknown_expectations_are_ignored() -> None:
    async with serving() as served:
        for expected in ("100-continue", "a miracle"):
            async with served.client.post(TEXT, json={"prompt": "a"}, headers={"Expect": expected}) as response:
                assert response.status == 200, await response.text()


async def test_an_overlong_prompt_is_named_in_the_words_that_clients_look_for() -> None:
    async with serving() as served:
        status, error = await served.error(TEXT, {"prompt": "x" * 256})
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert "This model's maximum context length is 256 tokens" in error["message"]
    assert "longer than the model's context length" in error["message"]


async def test_an_assistant_message_without_content() -> None:
    messages = [USER, {"role": "assistant", "content": None}, USER]
    async with serving() as served:
        status, _ = await served.post(CHAT, {"messages": messages})
        assert status == 200
        [request] = served.ring.submitted()
        status, error = await served.error(CHAT, {"messages": [{**USER, "role": "wizard"}]})
    assert tokens.unpack(request.tokens) == list(b"user:Hi\nassistant:\nuser:Hi\nassistant:")
    assert (status, error["code"]) == (400, "invalid_value")


async def test_nulls_and_harmless_values_are_taken() -> None:
    async with serving() as served:
        body = {
            "messages": [USER],
            "tools": None,
            "functions": [],
            "seed": None,
            "n": None,
            "temperature": 1,
            "user": "u",
        }
        status, _ = await served.post(CHAT, body)
        assert status == 200
        body = {"text": "a", "sampling_params": {"regex": None, "n": 1}, "lora_path": None, "log_metrics": True}
        status, _ = await served.post("/generate", body)
        assert status == 200


async def test_unknown_paths_methods_and_models() -> None:
    async with serving() as served:
        status, error = await served.error("/v2/nothing", {})
        assert (status, error["code"]) == (404, "unknown_url")
        async with served.client.get(TEXT) as response:
            assert (response.status, response.headers["Allow"]) == (405, "POST")
            assert (await response.json())["error"]["code"] == "method_not_allowed"
        for path, body in ((CHAT, {"messages": [USER]}), (TEXT, {"prompt": "x"}), ("/generate", {"text": "x"})):
            status, error = await served.error(path, {**body, "model": "gpt-9"})
            assert (status, error["param"], error["code"]) == (404, "model", "model_not_found")


async def test_the_body_limit() -> None:
    async with serving(body_limit=2000) as served:
        status, error = await served.error(CHAT, {"messages": [{"role": "user", "content": "x" * 3000}]})
        assert (status, error["code"]) == (413, "body_too_large")


@pytest.mark.parametrize(
    ("refusal", "status", "code"),
    [("queue_full", 429, "queue_full"), ("draining", 503, "draining"), ("too_large", 400, "context_length_exceeded")],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_ring_refuses(refusal: Any, status: int, code: str, stream: bool) -> None:
    async with serving() as served:
        served.ring.refusal = refusal
        async with served.client.post(CHAT, json={"messages": [USER], "stream": stream}) as response:
            assert response.status == status
            assert ("Retry-After" in response.headers) == (status in (429, 503))
            assert (await response.json())["error"]["code"] == code


async def test_a_request_times_out() -> None:
    async with serving(request_timeout=0.02) as served:
        served.ring.held = True
        status, error = await served.error(CHAT, {"messages": [USER]})
        assert (status, error["code"]) == (504, "request_timeout")
        assert served.ring.aborted()


async def test_a_failed_step_is_a_500() -> None:
    async with serving() as served:
        served.ring.failing = True
        status, error = await served.error(CHAT, {"messages": [USER]})
        assert (status, error["type"]) == (500, "server_error")


async def test_a_bug_in_a_handler_is_a_500_without_its_secrets() -> None:
    async with serving() as served:
        served.server.model.text.encode = lambda *_, **__: 1 // 0  # type: ignore[union-attr]
        status, error = await served.error(TEXT, {"prompt": "x"})
        assert (status, error["message"]) == (500, "the server failed: ZeroDivisionError")


async def test_loading_and_draining_are_503() -> None:
    async with serving(ready=False) as served:
        for path, body in ((CHAT, {"messages": [USER]}), ("/tokenize", {"prompt": "x"}), ("/flush_cache", {})):
            status, error = await served.error(path, body)
            assert (status, error["code"]) == (503, "loading")
        async with served.client.get("/ready") as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "5")
        async with served.client.get("/health") as response:
            assert response.status == 200
        served.server.phase = "draining"
        status, error = await served.error(CHAT, {"messages": [USER]})
        assert (status, error["code"]) == (503, "draining")


async def test_a_batch_beyond_the_queue() -> None:
    async with serving(max_running=2, max_queue=1) as served:
        status, error = await served.error(TEXT, {"prompt": ["x"] * 4})
        assert (status, error["code"]) == (400, "batch_too_large")


async def test_a_duplicate_rid() -> None:
    async with serving() as served:
        served.ring.held = True
        first = asyncio.ensure_future(served.post("/generate", {"text": "a", "rid": "mine"}))
        await served.ring.until(lambda: served.ring.open)
        status, error = await served.error("/generate", {"text": "b", "rid": "mine"})
        assert (status, error["param"]) == (400, "rid")
        served.ring.release()
        status, answer = await first
        assert (status, answer["meta_info"]["id"]) == (200, "mine")


async def test_a_long_prompt_is_refused_with_its_length() -> None:
    async with serving(max_model_len=64) as served:
        _, error = await served.error(TEXT, {"prompt": "x" * 25_000})
        assert "25000" in error["message"] and "64" in error["message"]
        assert error["code"] == "context_length_exceeded"
        status, answer = await served.post(TEXT, {"prompt": "x" * 63, "max_tokens": 1000})
        assert (status, answer["choices"][0]["finish_reason"]) == (200, "length")
        assert json.dumps(answer["usage"]["total_tokens"]) == "64"
