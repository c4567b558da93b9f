"""Turns with tools: calls and results are in the log, and in the next turn's prompt."""

import json
from pathlib import Path
from typing import Any

import pytest

from baton.actors.tokens import unpack
from tests.api.fake_ring import AGENT, Served, payloads, read_events, serving

pytestmark = pytest.mark.anyio
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
REPLY = '<think>Hm.</think>I look.<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
WRITTEN = f'<tool_call>{{"name": "weather", "arguments": {json.dumps({"city": "Köln"})}}}</tool_call>'
TURNS = "/v1/sessions/s/turns"
USER = {"role": "user", "content": "Hi"}
LENGTH = 4000


def last_prompt(served: Served) -> str:
    return bytes(unpack(served.ring.submitted()[-1].tokens)).decode()


async def call(served: Served) -> dict[str, Any]:
    served.ring.reply = REPLY
    status, answer = await served.post(TURNS, {"messages": [USER], "tools": [WEATHER]})
    assert status == 200, answer
    message: dict[str, Any] = answer["message"]
    assert answer["text"] == REPLY
    return message


def result(message: dict[str, Any]) -> dict[str, Any]:
    [called] = message["tool_calls"]
    assert called["function"] == {"name": "weather", "arguments": '{"city": "Köln"}'}
    return {"role": "tool", "tool_call_id": called["id"], "content": "rain"}


SHOWN = f"tools:{json.dumps([WEATHER])}\nuser:Hi\nassistant:<think>Hm.</think>I look.{WRITTEN}\ntool:rain\nassistant:"


async def test_a_turn_with_a_result_continues_after_the_call() -> None:
    async with serving(formats=AGENT, max_model_len=LENGTH) as served:
        await served.post("/v1/sessions", {"id": "s"})
        message = await call(served)
        assert (message["content"], message["reasoning_content"]) == ("I look.", "Hm.")
        served.ring.reply = "Rain."
        status, answer = await served.post(TURNS, {"messages": [result(message)], "tools": [WEATHER]})
        assert status == 200 and "message" not in answer
        assert last_prompt(served) == SHOWN
        async with served.client.get("/v1/sessions/s") as response:
            first, second = (await response.json())["turns"]
    assert (first["text"], first["reasoning_content"], len(first["tool_calls"])) == ("I look.", "Hm.", 1)
    assert second["text"] == "Rain." and "tool_calls" not in second


async def test_the_last_event_of_a_stream_has_the_calls() -> None:
    async with serving(formats=AGENT, max_model_len=LENGTH) as served:
        await served.post("/v1/sessions", {"id": "s"})
        served.ring.reply = REPLY
        body = {"messages": [USER], "tools": [WEATHER], "stream": True}
        async with served.client.post(TURNS, json=body) as response:
            ended = payloads(await read_events(response))[-1]
    assert ended["type"] == "turn.ended" and result(ended["message"])


async def test_calls_survive_a_restart(tmp_path: Path) -> None:
    options: dict[str, Any] = {"formats": AGENT, "max_model_len": LENGTH, "session_dir": str(tmp_path)}
    async with serving(**options) as served:
        await served.post("/v1/sessions", {"id": "s"})
        message = await call(served)
    async with serving(**options) as served:
        status, answer = await served.post(TURNS, {"messages": [result(message)], "tools": [WEATHER]})
        assert status == 200, answer
        assert last_prompt(served) == SHOWN


async def test_tools_need_messages() -> None:
    async with serving(formats=AGENT, max_model_len=LENGTH) as served:
        await served.post("/v1/sessions", {"id": "s"})
        status, error = await served.error(TURNS, {"text": "Hi", "tools": [WEATHER]})
        assert (status, error["param"]) == (400, "tools")
        status, error = await served.error(TURNS, {"messages": [USER], "tools": [{"type": "x"}]})
        assert (status, error["param"]) == (400, "tools[0].type")
        status, _ = await served.post(TURNS, {"messages": [USER], "tools": [WEATHER], "tool_choice": "required"})
        assert status == 200 and "weather" in served.ring.submitted()[-1].grammar
