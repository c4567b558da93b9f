"""A grammar whose dead end shows only in the middle of an output, in every API: a 400 that clients do not repeat."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from aiohttp import ClientSession
from websockets.sync.client import connect

from tests.api.server_process import SERVE, ServerProcess
from tests.api.test_structured_outputs import post

# After 30 letters, one a token, the rest of the regular expression becomes too large. No check of the grammar finds it.
PATTERN = "[qxz]{30}(.{1,1000}){1,1000}"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "pattern": f"^{PATTERN}$"}},
    "required": ["a"],
    "additionalProperties": False,
}
MESSAGES: Any = [{"role": "user", "content": "Hi"}]
TOOL = {"name": "write", "parameters": SCHEMA}
LETTERS = {"temperature": 0, "max_tokens": 400}
CHAT: dict[str, Any] = {"messages": MESSAGES, **LETTERS}
FORMAT: Any = {"type": "json_schema", "name": "s", "schema": SCHEMA, "strict": True}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT | {"guided_regex": PATTERN}),
    "a choice of two": ("/v1/chat/completions", CHAT | {"guided_regex": PATTERN, "n": 2}),
    "a call": (
        "/v1/chat/completions",
        CHAT | {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"},
    ),
    "completions": ("/v1/completions", {"prompt": "a", "guided_json": SCHEMA, **LETTERS}),
    "generate": ("/generate", {"text": "a", "sampling_params": {"regex": PATTERN, "max_new_tokens": 400}}),
    "responses": ("/v1/responses", {"input": "a", "text": {"format": FORMAT}, "temperature": 0}),
    "messages": (
        "/v1/messages",
        CHAT | {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    ),
    "a turn": ("/v1/sessions/s/turns", CHAT | {"guided_regex": PATTERN}),
}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess([*SERVE, "--memory", "256M", "--max-running", "8", "--codec-check"]) as running:
        yield running
        slots = running.get("/debug/slots")
        assert all(slot["place"] in ("free", "cached") for slot in slots), slots


@pytest.mark.parametrize("name", BODIES)
def test_a_dead_end_is_a_400_that_says_after_what(server: ServerProcess, name: str) -> None:
    path, body = BODIES[name]
    post(server, "/v1/sessions", {"id": "s"})
    status, answer = post(server, path, body)
    error = answer["error"]
    assert status == 400 and error["type"] == "invalid_request_error", answer
    assert "cannot follow its grammar: after '" in error["message"] and "too complex" in error["message"]
    if path != "/v1/messages":
        assert error["code"] == "grammar_dead_end"


@pytest.mark.anyio
@pytest.mark.parametrize("name", BODIES)
async def test_a_stream_ends_with_the_same_error(server: ServerProcess, name: str) -> None:
    path, body = BODIES[name]
    await asyncio.to_thread(post, server, "/v1/sessions", {"id": "s"})
    async with ClientSession(server.url) as session, session.post(path, json=body | {"stream": True}) as response:
        assert response.status == 200
        blocks = (await response.text()).strip().split("\n\n")
    found = [json.loads(block.partition("data: ")[2]) for block in blocks if "[DONE]" not in block]
    [failed] = [event for event in found if event.get("error") or event.get("type") in ("error", "response.failed")]
    error = failed["response"]["error"] if path == "/v1/responses" else failed["error"]
    assert len(found) > 2 and "cannot follow its grammar: after '" in error["message"], error
    assert error.get("code", "grammar_dead_end") == "grammar_dead_end"
    assert error.get("type", "invalid_request_error") == "invalid_request_error"


def test_clients_do_not_repeat_it(server: ServerProcess) -> None:
    def answered() -> int:
        return sum(line["event"] == "request" and line["status"] == 400 for line in server.log)

    before = answered()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=3) as api:
        with pytest.raises(openai.BadRequestError, match="after"):
            api.chat.completions.create(model="default", extra_body={"guided_regex": PATTERN}, **CHAT)
        with pytest.raises(openai.BadRequestError, match="after"):
            api.responses.create(model="default", input="a", text={"format": FORMAT})
    with (
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=3) as other,
        pytest.raises(anthropic.BadRequestError, match="after"),
    ):
        other.messages.create(
            model="default",
            max_tokens=400,
            messages=MESSAGES,
            output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
        )
    server.wait_until(lambda: answered() >= before + 3)
    assert answered() == before + 3


def test_a_response_in_the_background_fails_with_it(server: ServerProcess) -> None:
    status, answer = post(server, "/v1/responses", BODIES["responses"][1] | {"background": True})
    assert status == 200
    server.wait_until(lambda: server.get(f"/v1/responses/{answer['id']}")["status"] not in ("queued", "in_progress"))
    failed = server.get(f"/v1/responses/{answer['id']}")
    assert failed["status"] == "failed" and failed["error"]["code"] == "grammar_dead_end"


def test_a_response_over_a_websocket_fails_with_it(server: ServerProcess) -> None:
    with connect(f"{server.url.replace('http', 'ws')}/v1/responses") as socket:
        socket.send(json.dumps({"type": "response.create", **BODIES["responses"][1]}))
        event = json.loads(socket.recv(30))
        while event["type"] not in ("response.failed", "error", "response.completed"):
            event = json.loads(socket.recv(30))
    assert event["type"] == "response.failed" and event["response"]["error"]["code"] == "grammar_dead_end"


def test_a_turn_that_met_it_is_over_and_the_session_goes_on(server: ServerProcess) -> None:
    post(server, "/v1/sessions", {"id": "t"})
    assert post(server, "/v1/sessions/t/turns", BODIES["a turn"][1])[0] == 400
    status, answer = post(server, "/v1/sessions/t/turns", {"messages": MESSAGES, "guided_regex": "[0-9]{3}"})
    assert status == 200 and answer["text"].isdigit()


def test_a_wrong_tool_is_named(server: ServerProcess) -> None:
    wrong = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": parameters}}
        for name, parameters in (("read", {"type": "object", "properties": {}}), ("tree", wrong))
    ]
    status, answer = post(server, "/v1/chat/completions", CHAT | {"tools": tools, "tool_choice": "required"})
    assert status == 400 and answer["error"]["param"] == "tools", answer
    assert (
        "the parameters of 'tree': #/properties/a must contain the whole schema (#) again" in answer["error"]["message"]
    )
