"""Results of a client's own tools in every API: images in them, and results that name a tool instead of a call.

A client sends a result again with every later turn, so an error for a result would end the conversation for good.
"""

from collections.abc import Callable
from typing import Any

import openai
import pytest

from baton.actors.tokens import unpack
from tests.api.fake_ring import AGENT, Served, serving

pytestmark = pytest.mark.anyio
USER: Any = {"role": "user", "content": "Hi"}
LOOK = {"type": "text", "text": "Look:"}
LEFT_OUT = "[The tool returned an image. It was left out: this model reads only text.]"
# Images as the clients of each API write them.
OF_CHAT = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
OF_RESPONSES = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo=", "detail": "auto"}
OF_MESSAGES = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
CALL = {"id": "c", "type": "function", "function": {"name": "view", "arguments": "{}"}}
GOAL = {"type": "function_call_output", "name": "goal_objective", "namespace": "agent", "output": "Win."}


def chat(*parts: Any) -> dict[str, Any]:
    answer = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    return {"messages": [USER, answer, {"role": "tool", "tool_call_id": "c", "content": list(parts)}]}


def items(*parts: Any) -> list[Any]:
    call = {"type": "function_call", "call_id": "c", "name": "view", "arguments": "{}"}
    return [USER, call, {"type": "function_call_output", "call_id": "c", "output": list(parts)}]


def messages(*parts: Any) -> dict[str, Any]:
    call = {"type": "tool_use", "id": "c", "name": "view", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": list(parts)}
    turns = [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    return {"max_tokens": 5, "messages": turns}


def last_prompt(served: Served) -> str:
    return bytes(unpack(served.ring.submitted()[-1].tokens)).decode()


BODIES: dict[str, tuple[str, Callable[..., dict[str, Any]], Any]] = {
    "chat": ("/v1/chat/completions", chat, OF_CHAT),
    "responses": ("/v1/responses", lambda *parts: {"input": items(*parts)}, OF_RESPONSES),
    "messages": ("/v1/messages", messages, OF_MESSAGES),
    "session": ("/v1/sessions/s/turns", chat, OF_CHAT),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("api", BODIES)
async def test_the_model_reads_that_a_tool_returned_an_image(api: str, stream: bool) -> None:
    path, body, image = BODIES[api]
    async with serving(formats=AGENT, max_model_len=2000) as served:
        await served.post("/v1/sessions", {"id": "s"})
        async with served.client.post(path, json=body(LOOK, image) | {"stream": stream}) as response:
            assert response.status == 200, await response.text()
            await response.read()
        between = "\n" if api == "messages" else ""
        assert f"tool:Look:{between}{LEFT_OUT}\n" in last_prompt(served)


@pytest.mark.parametrize(
    "part, words",
    [
        (OF_CHAT, "an image"), (OF_RESPONSES, "an image"), (OF_MESSAGES, "an image"), ({"type": "file"}, "a file"),
        ({"type": "input_file", "file_data": "x"}, "a file"), ({"type": "document", "source": {}}, "a file"),
        ({"type": "input_audio", "input_audio": {}}, "a sound recording"), ({"type": "video_url"}, "a video"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("api", BODIES)
async def test_everything_else_that_a_tool_may_return_is_replaced_too(api: str, part: Any, words: str) -> None:
    path, body, _ = BODIES[api]
    async with serving(formats=AGENT, max_model_len=2000) as served:
        await served.post("/v1/sessions", {"id": "s"})
        assert (await served.post(path, body(part)))[0] == 200
        assert f"tool:{LEFT_OUT.replace('an image', words)}\n" in last_prompt(served)


@pytest.mark.parametrize("api", BODIES)
async def test_an_image_of_the_user_and_an_unknown_part_of_a_tool_are_refused(api: str) -> None:
    path, body, image = BODIES[api]
    async with serving(formats=AGENT, max_model_len=2000) as served:
        await served.post("/v1/sessions", {"id": "s"})
        field = "input" if api == "responses" else "messages"
        request_body: dict[str, Any] = {field: [{"role": "user", "content": [image]}], "max_tokens": 5}
        request_body |= {"max_output_tokens": request_body.pop("max_tokens")} if api == "responses" else {}
        for refused, kind in ((request_body, image["type"]), (body({"type": "hologram"}), "hologram")):
            status, answer = await served.post(path, refused)
            assert status == 400 and repr(kind) in answer["error"]["message"], answer
        assert served.ring.submitted() == []


async def test_a_response_with_such_a_result_is_continued_and_listed() -> None:
    async with (
        serving(formats=AGENT, max_model_len=2000) as served,
        openai.AsyncOpenAI(base_url=f"{served.url}v1", api_key="none", max_retries=0) as api,
    ):
        conversation = await api.conversations.create(items=items(OF_RESPONSES))
        first = await api.responses.create(model="fake", input=items(OF_RESPONSES))
        await api.responses.create(model="fake", input="And?", previous_response_id=first.id)
        assert f"tool:{LEFT_OUT}\n" in last_prompt(served)
        await api.responses.create(model="fake", input="And?", conversation=conversation.id)
        assert f"tool:{LEFT_OUT}\n" in last_prompt(served)
        listed: Any = [item async for item in api.responses.input_items.list(first.id, order="asc")]
        assert (listed[2].type, listed[2].output) == ("function_call_output", LEFT_OUT)


async def test_a_result_without_a_call_is_taken_by_the_name_of_its_tool() -> None:
    """Codex sends a goal of its user so, after the result of its tool create_goal, and in every later turn."""
    async with (
        serving(formats=AGENT, max_model_len=2000) as served,
        openai.AsyncOpenAI(base_url=f"{served.url}v1", api_key="none", max_retries=0) as api,
    ):
        sent: Any = [*items(LOOK | {"type": "input_text"}), GOAL]
        first = await api.responses.create(model="fake", input=sent)
        assert last_prompt(served).endswith("tool:Look:\ntool:Win.\nassistant:")
        listed: Any = [item async for item in api.responses.input_items.list(first.id, order="asc")]
        assert (listed[3].call_id, listed[3].name, listed[3].output) == (None, "agent__goal_objective", "Win.")
        again: Any = [item.model_dump(exclude_none=True) for item in listed]
        prompt = last_prompt(served)
        await api.responses.create(model="fake", input=again)
        assert last_prompt(served) == prompt
        conversation = await api.conversations.create(items=sent)
        await api.responses.create(model="fake", input="And?", conversation=conversation.id)
        assert "tool:Win.\n" in last_prompt(served)
        chat_result: Any = {"role": "tool", "name": "agent__goal_objective", "content": "Win."}
        await api.chat.completions.create(model="fake", messages=[USER, chat_result])
        assert last_prompt(served) == "user:Hi\ntool:Win.\nassistant:"


@pytest.mark.parametrize(
    "change", [{"name": None}, {"name": ""}, {"name": 3}, {"namespace": 3}, {"call_id": 3}, {"output": None}]
)
async def test_a_result_of_nothing_is_refused_by_name(change: dict[str, Any]) -> None:
    async with serving(formats=AGENT) as served:
        status, error = await served.error("/v1/responses", {"input": [USER, GOAL | change]})
        field = "call_id" if "name" in change and change["name"] != 3 else next(iter(change))
        assert (status, error["param"]) == (400, f"input[1].{field}"), error
