"""Errors in Anthropic's form: statuses, messages, and the exceptions of its client."""

import asyncio
from typing import Any

import anthropic
import pytest

from tests.api.anthropic.test_messages import HELLO, MARK, NOW, WEATHER, client, read
from tests.api.fake_ring import Served, serving

pytestmark = pytest.mark.anyio
PATH = "/v1/messages"
CALLED = {"type": "tool_use", "id": "t", "name": "now", "input": {}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


def user(*blocks: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def assistant(*blocks: object) -> dict[str, Any]:
    return {"messages": [*HELLO, {"role": "assistant", "content": list(blocks)}, *HELLO]}


def text(words: object = "x", **more: object) -> dict[str, object]:
    return {"type": "text", "text": words, **more}


async def refused(served: Served, body: Any, path: str = PATH, **more: Any) -> tuple[int, str, str]:
    """Post a refused body; return status, type and message. Check the request's id in the answer and both headers."""
    async with served.client.post(path, json=body, **more) as response:
        answer = await response.json()
        assert answer == {"type": "error", "error": answer["error"], "request_id": response.headers["request-id"]}
        assert response.headers["x-request-id"] == answer["request_id"]
        assert set(answer["error"]) == {"type", "message"}
        return response.status, answer["error"]["type"], answer["error"]["message"]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages is required"),
    ({"messages": []}, "messages"),
    ({"max_tokens": None}, "max_tokens is required"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": [], "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content is required"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [{**HELLO[0], "name": "x"}]}, "messages[0].name"),
    (user(3), "messages[0].content[0]"),
    (user({"type": ["text"]}), "messages[0].content[0]"),
    (user(text(), text(3)), "messages[0].content[1].text"),
    (user(IMAGE), "messages[0].content[0] has type 'image'"),
    (user({"type": "document", "source": {}}), "messages[0].content[0] has type 'document'"),
    (user(CALLED), "messages[0].content[0]: tool_use"),
    (user({"type": "thinking", "thinking": ""}), "messages[0].content[0]: thinking"),
    (user({"type": "tool_result"}), "messages[0].content[0].tool_use_id"),
    (user({"type": "tool_result", "tool_use_id": "t", "is_error": 1}), "messages[0].content[0].is_error"),
    (
        user({"type": "tool_result", "tool_use_id": "t", "content": [IMAGE, CALLED]}),
        "messages[0].content[0].content[1]",
    ),
    (assistant({"type": "tool_result", "tool_use_id": "t"}), "messages[1].content[0]: tool_result"),
    (assistant({**CALLED, "input": "{}"}), "messages[1].content[0].input"),
    (assistant({**CALLED, "id": None}), "messages[1].content[0].id"),
    (assistant({**CALLED, "name": 3}), "messages[1].content[0].name"),
    (assistant({"type": "thinking"}), "messages[1].content[0].thinking"),
    (
        {"messages": assistant(CALLED)["messages"][:2]},
        "messages[1]: each tool_use block must be followed by its tool_result",
    ),
    ({"system": 3}, "system"),
    ({"system": [IMAGE]}, "system[0]"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type is 'web_search_20250305'"),
    ({"tools": [{"name": "now"}]}, "tools[0].input_schema"),
    ({"tools": [{**NOW, "name": "a b"}]}, "tools[0].name"),
    (
        {"tools": [{**NOW, "input_schema": {"type": "array"}}]},
        "tools[0].input_schema must be the JSON schema of an object",
    ),
    ({"tools": [{**NOW, "input_schema": [3]}]}, "tools[0].input_schema"),
    ({"tools": [{**NOW, "strict": 1}]}, "tools[0].strict"),
    ({"tools": [NOW, NOW]}, "tools[1]"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [NOW], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"thinking": {"type": "sometimes"}}, "thinking.type"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "number", "multipleOf": "x"}}}}, "schema"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"container": "c"}, "container"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ({"colour": 1}, "colour"),
    ({"temperature": -1}, "temperature"),
    (user(text(cache_control={"type": "lasting"})), "messages[0].content[0].cache_control"),
    (user(text(cache_control={"type": "ephemeral", "ttl": "1d"})), "messages[0].content[0].cache_control"),
    ({"cache_control": 3}, "cache_control"),
    ({"tools": [{**NOW, "cache_control": True}]}, "tools[0].cache_control"),
    (user(*[text(**MARK)] * 5), "at most 4 blocks may have cache_control, got 5"),
    (user(*[text(**MARK)] * 3) | {"system": [text(**MARK)], "tools": [{**NOW, **MARK}]}, "got 5"),
    (user({"type": "tool_result", "tool_use_id": "t", "content": [text(cache_control=3)]}), "[0].cache_control"),
    ({"messages": [{"role": "user", "content": "refuse me"}]}, "roles must alternate"),
]


@pytest.mark.parametrize("body, named", WRONG, ids=lambda value: None)
async def test_errors_name_the_field(body: dict[str, Any], named: str) -> None:
    async with client() as (_, served):
        status, kind, message = await refused(served, {"messages": HELLO, "max_tokens": 9} | body)
        assert (status, kind) == (400, "invalid_request_error") and named in message, message
        assert served.ring.submitted() == []


@pytest.mark.parametrize("path", [PATH, f"{PATH}/count_tokens"])
@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}, "x"])
async def test_a_thread_is_refused_with_the_details_by_which_clients_do_without(path: str, thread: object) -> None:
    async with serving() as served:
        body = {"messages": HELLO, "max_tokens": 9, "thread": thread}
        status, answer = await served.post(path, body)
        assert (await served.post(path, body | {"thread": None}))[0] == 200
    assert status == 400 and answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


async def test_unsupported_hints_are_ignored() -> None:
    body = {
        "messages": HELLO, "max_tokens": 9, "metadata": {"user_id": "u"}, "service_tier": "auto", "system": None,
        "context_management": {"edits": []}, "tools": [], "stop_sequences": [],
    }  # fmt: skip
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b"}
    async with (
        client("Hi") as (_, served),
        served.client.post(f"{PATH}?beta=true", json=body, headers=headers) as response,
    ):
        assert response.status == 200, await response.text()
        assert response.headers["request-id"] == response.headers["x-request-id"]


async def test_errors_become_the_clients_exceptions() -> None:
    async with client("Hi", body_limit=20_000) as (api, served):
        ask: Any = {"model": "fake", "messages": HELLO, "max_tokens": 9}
        with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
            await api.messages.create(**{**ask, "max_tokens": -1})
        with pytest.raises(anthropic.NotFoundError, match="the model 'claude' does not exist") as missing:
            await api.messages.create(**{**ask, "model": "claude"})
        assert missing.value.type == "not_found_error" and missing.value.request_id
        with pytest.raises(anthropic.APIStatusError) as large:
            await api.messages.create(**{**ask, "system": "x" * 20_000})
        assert (large.value.status_code, large.value.type) == (413, "request_too_large")
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .* 4[0-9]+ tokens"):
            await api.messages.create(**{**ask, "system": "x" * 4000})
        with pytest.raises(anthropic.NotFoundError):
            await api.messages.batches.list()
        served.ring.refusal = "queue_full"
        with pytest.raises(anthropic.RateLimitError) as full:
            await api.messages.create(**ask)
        assert full.value.response.headers["Retry-After"]
        served.ring.refusal = "draining"
        with pytest.raises(anthropic.OverloadedError):
            await api.messages.create(**ask)
        served.ring.refusal, served.ring.failing = None, True
        with pytest.raises(anthropic.InternalServerError, match="the model failed"):
            await api.messages.create(**ask)


async def test_errors_outside_of_handlers_have_the_same_form() -> None:
    async with client() as (_, served):
        assert (await refused(served, {}, f"{PATH}/nothing"))[:2] == (404, "not_found_error")
        assert (await refused(served, {}, headers={"Host": "evil.example"}))[:2] == (403, "permission_error")
        headers = {"Content-Encoding": "rot13"}
        assert (await refused(served, {}, headers=headers))[:2] == (415, "invalid_request_error")
        async with served.client.get(PATH) as response:
            assert (response.status, response.headers["Allow"]) == (405, "POST")
            assert (await response.json())["error"]["type"] == "invalid_request_error"
        async with served.client.post(PATH, data=b"{") as response:
            assert (await response.json())["error"]["type"] == "invalid_request_error"
        served.server.ready().text.encode_marked_chat = lambda *_, **__: 1 // 0  # type: ignore[method-assign]
        status, kind, message = await refused(served, {"messages": HELLO, "max_tokens": 9})
        assert (status, kind, message) == (500, "api_error", "the server failed: ZeroDivisionError")
        async with served.client.post(f"{PATH}x", json={}) as response:
            assert set((await response.json())["error"]) == {"message", "type", "param", "code"}


async def test_loading_and_draining_are_overloaded_errors() -> None:
    async with serving(ready=False) as served:
        for path in (PATH, f"{PATH}/count_tokens"):
            async with served.client.post(path, json={"messages": HELLO, "max_tokens": 9}) as response:
                assert (response.status, response.headers["Retry-After"]) == (529, "5")
                assert (await response.json())["error"] == {
                    "type": "overloaded_error",
                    "message": "the model is loading",
                }


async def test_a_request_times_out() -> None:
    async with client(request_timeout=0.02) as (_, served):
        served.ring.held = True
        assert (await refused(served, {"messages": HELLO, "max_tokens": 9}))[:2] == (504, "timeout_error")


async def test_an_error_in_mid_stream_is_an_event() -> None:
    async with client("Hello", ping_interval=0.01) as (api, served):
        ask: Any = {"model": "fake", "messages": HELLO, "max_tokens": 9, "stream": True}
        served.ring.held, served.ring.failing = True, True
        async with served.client.post(PATH, json=ask) as response:
            begun = await response.content.readany()
            served.ring.release()
            events = read((begun + await response.read()).decode())
            assert events[0]["type"] == "message_start"
            assert events[-1]["error"]["type"] == "api_error" and "the model failed" in events[-1]["error"]["message"]
            assert events[-1]["request_id"] == response.headers["request-id"]
        served.ring.held = True
        stream = await api.messages.create(**ask)
        served.ring.release()
        with pytest.raises(anthropic.APIStatusError, match="the model failed") as failed:
            async for _ in stream:
                pass
        assert failed.value.type == "api_error"


async def test_a_client_that_leaves_aborts() -> None:
    async with client("Hello " * 50) as (api, served):
        served.ring.pause = 0.01
        stream = await api.messages.create(model="fake", messages=HELLO, max_tokens=300, stream=True)
        async for _ in stream:
            break
        await stream.close()
        async with asyncio.timeout(10):
            await served.ring.until(served.ring.aborted)


async def test_keys() -> None:
    async with client("Hi", api_key=("one", "two")) as (_, served):
        ask: Any = {"model": "fake", "messages": HELLO, "max_tokens": 9}
        for key, expected in (("one", None), ("two", None), ("three", anthropic.AuthenticationError)):
            async with anthropic.AsyncAnthropic(base_url=served.url, api_key=key, max_retries=0) as api:
                if expected is None:
                    assert (await api.messages.create(**ask)).stop_reason == "end_turn"
                else:
                    with pytest.raises(expected):
                        await api.messages.create(**ask)
        async with anthropic.AsyncAnthropic(base_url=served.url, auth_token="two", max_retries=0) as api:
            await api.messages.create(**ask)
        salts = [request.salt for request in served.ring.submitted()]
        assert salts[0] != salts[1] == salts[2]
        # If a request has both headers, the key in Authorization counts.
        both = {"Authorization": "Bearer three", "x-api-key": "one"}
        assert (await refused(served, ask, headers=both))[:2] == (401, "authentication_error")
        async with served.client.get("/v1/models", headers={"x-api-key": "one"}) as response:
            assert response.status == 200


async def test_a_model_without_tools_refuses_them() -> None:
    async with serving() as served:
        status, kind, message = await refused(served, {"messages": HELLO, "max_tokens": 9, "tools": [WEATHER]})
        assert (status, kind) == (400, "invalid_request_error") and message.startswith("tools is not supported")


async def test_disabling_thinking_is_refused_if_the_model_always_reasons() -> None:
    async with client("Hm.</think>Yes.") as (_, served):
        text_side: Any = served.server.ready().text
        text_side.template_variables = frozenset({"messages", "tools"})
        ask: dict[str, Any] = {"messages": HELLO, "max_tokens": 9}
        status, _, message = await refused(served, ask | {"thinking": {"type": "disabled"}})
        assert status == 400 and message.startswith("thinking.type cannot be 'none'")
        for thinking in ({"type": "enabled", "budget_tokens": 2000}, {"type": "adaptive"}):
            status, answer = await served.post(PATH, ask | {"thinking": thinking})
            assert status == 200, answer


async def test_counting() -> None:
    async with client("Hi") as (api, served):
        fields: Any = {
            "model": "fake", "messages": [*HELLO, {"role": "assistant", "content": [CALLED]}, user(
                {"type": "tool_result", "tool_use_id": "t", "content": "x"})["messages"][0]],
            "system": [text("é", **MARK)], "tools": [WEATHER, NOW], "tool_choice": {"type": "any"},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        }  # fmt: skip
        count = await api.messages.count_tokens(**fields)
        served.ring.cached = 5
        usage = (await api.messages.create(**fields, max_tokens=9)).usage
        parts = (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens)
        assert count.input_tokens == sum(part or 0 for part in parts) == served.ring.submitted()[-1].prompt_len
        assert len(served.ring.submitted()) == 1
        with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\]"):
            await api.messages.count_tokens(model="fake", messages=[user(IMAGE)["messages"][0]])
