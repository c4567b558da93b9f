"""Responses as turns of a session, over HTTP and websocket, on a fake ring."""

import asyncio
import errno
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from aiohttp import ClientWebSocketResponse

from baton.actors import tokens
from baton.api import errors
from baton.api.sessions.saver import not_saved
from baton.api.sessions.session import OpenTurn
from tests.api.fake_ring import EOS, Served, serving

pytestmark = pytest.mark.anyio
REPLY = "Hello, wörld."
PATH = "/v1/responses"
SESSIONS = "/v1/sessions"


@asynccontextmanager
async def client_of(served: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{served.url}v1", api_key="none", max_retries=0) as client:
        yield client


async def open_session(served: Served, **body: Any) -> str:
    _, session = await served.post(SESSIONS, body)
    return str(session["id"])


async def session_of(served: Served, id: str) -> Any:
    async with served.client.get(f"{SESSIONS}/{id}") as response:
        return await response.json()


async def settled(served: Served, id: str) -> Any:
    """Return the session once it is idle."""
    for _ in range(1000):
        if (seen := await session_of(served, id))["status"] == "idle":
            return seen
        await asyncio.sleep(0.01)
    raise AssertionError(seen)


def prompts(served: Served) -> list[bytes]:
    return [bytes(i for i in tokens.unpack(request.tokens) if i != EOS) for request in served.ring.submitted()]


async def create(socket: ClientWebSocketResponse, **body: Any) -> list[Any]:
    """Create a response over the websocket; return its events, or one error event."""
    await socket.send_str(json.dumps({"type": "response.create", **body}))
    events = []
    while True:
        events.append(json.loads((await socket.receive(10)).data))
        if events[-1]["type"] in ("error", "response.completed", "response.incomplete", "response.failed"):
            return events


async def test_a_conversation_over_http() -> None:
    async with serving(max_model_len=1000) as served, client_of(served) as client:
        served.ring.cached = 3
        id = await open_session(served)
        first = await client.responses.create(model="fake", input="a", conversation=id, instructions="One.")
        extra: Any = first.model_extra
        assert first.conversation is not None and first.conversation.id == id
        assert (extra["turn"], first.instructions, first.output_text) == (1, "One.", REPLY)
        assert first.usage is not None and first.usage.input_tokens_details.cached_tokens == 3
        stream = await client.responses.create(
            model="fake", input="b", conversation={"id": id}, instructions="Two.", stream=True
        )
        events = [event async for event in stream]
        assert {event.response.conversation.id for event in events if hasattr(event, "response")} == {id}
        assert (events[-1].response.model_extra["turn"], events[-1].response.instructions) == (2, None)
        assert await client.responses.retrieve(first.id) == first
        seen = await session_of(served, id)
    assert prompts(served)[0] == b"system:One.\nuser:a\nassistant:"
    assert prompts(served)[1] == f"system:One.\nuser:a\nassistant:{REPLY}\nuser:b\nassistant:".encode()
    assert [turn["id"] for turn in seen["turns"]] == [first.id, events[-1].response.id]
    assert [turn["status"] for turn in seen["turns"]] == ["completed", "completed"]


async def test_turns_and_responses_are_one_history() -> None:
    async with serving(max_model_len=1000) as served, served.client.ws_connect(PATH) as socket:
        id = await open_session(served, cache_salt="salt")
        [*_, last] = await create(socket, input="a", conversation=id, max_output_tokens=2)
        assert (last["response"]["conversation"], last["response"]["turn"]) == ({"id": id}, 1)
        await served.post(f"{SESSIONS}/{id}/turns", {"messages": [{"role": "user", "content": "b"}], "max_tokens": 2})
        [*_, last] = await create(socket, input="c", conversation=id, after=2, max_output_tokens=2)
        assert last["response"]["turn"] == 3
        assert prompts(served)[-1] == b"user:a\nassistant:He\nuser:b\nassistant:He\nuser:c\nassistant:"
        assert {request.salt for request in served.ring.submitted()} == {"salt"}
        _, fork = await served.post(f"{SESSIONS}/{id}/fork", {"turn": 1})
        await create(socket, input="d", conversation=fork["id"])
        assert prompts(served)[-1] == b"user:a\nassistant:He\nuser:d\nassistant:"
        await served.post(f"{SESSIONS}/{id}/rewind", {"turn": 0})
        [*_, last] = await create(socket, input="e", conversation=id, instructions="New.")
        assert last["response"]["turn"] == 4
        assert prompts(served)[-1] == b"system:New.\nuser:e\nassistant:"


async def test_refusals() -> None:
    async with serving() as served, client_of(served) as client, served.client.ws_connect(PATH) as socket:
        id = await open_session(served)
        with pytest.raises(openai.NotFoundError) as gone:
            await client.responses.create(model="fake", input="a", conversation="none")
        assert (gone.value.code, gone.value.param) == ("session_not_found", "conversation")
        [error] = await create(socket, input="a", conversation="none")
        assert (error["status"], error["error"]["code"]) == (404, "session_not_found")
        first = await client.responses.create(model="fake", input="a")
        for body, code in (
            ({"previous_response_id": first.id}, "mutually_exclusive_parameters"),
            ({"cache_salt": "s"}, "invalid_value"),
            ({"input": [{"role": "user", "content": "refuse me"}]}, "chat_template_error"),
        ):
            status, answer = await served.error(PATH, {"input": "b", "conversation": id, **body})
            assert (status, answer["code"]) == (400, code)
        assert (await served.error(PATH, {"input": "b", "after": 1}))[1]["param"] == "after"
        assert (await served.error(PATH, {"input": "b", "conversation": id, "after": 7}))[1]["code"] == (
            "session_moved_on"
        )
        served.ring.refusal = "queue_full"
        assert (await served.error(PATH, {"input": "b", "conversation": id}))[0] == 429
        seen = await session_of(served, id)
        assert (seen["status"], seen["turns"], len(served.responses)) == ("idle", [], 1)


async def test_a_session_of_texts_takes_no_responses() -> None:
    async with serving() as served:
        id = await open_session(served)
        await served.post(f"{SESSIONS}/{id}/turns", {"text": "a"})
        status, error = await served.error(PATH, {"input": "b", "conversation": id})
        assert (status, error["code"]) == (400, "not_a_chat")
        assert (await session_of(served, id))["status"] == "idle"


async def test_one_response_at_a_time() -> None:
    async with serving() as served, client_of(served) as client:
        id = await open_session(served)
        served.ring.held = True
        first = asyncio.ensure_future(client.responses.create(model="fake", input="a", conversation=id))
        await served.ring.until(lambda: served.ring.open)
        with pytest.raises(openai.ConflictError) as busy:
            await client.responses.create(model="fake", input="b", conversation=id)
        assert busy.value.code == "session_busy"
        served.ring.release()
        assert (await first).status == "completed"
        assert (await client.responses.create(model="fake", input="b", conversation=id)).model_extra["turn"] == 2


@pytest.mark.parametrize("running", [False, True], ids=["queued", "running"])
@pytest.mark.parametrize("how", ["cancel", "disconnect", "websocket"])
async def test_a_cut_response_leaves_the_session_where_its_turn_ends(how: str, running: bool) -> None:
    async with serving(max_model_len=1000) as served, client_of(served) as client:
        id = await open_session(served)
        await client.responses.create(model="fake", input="x", conversation=id)
        served.ring.held, served.ring.pause = not running, 0.01
        socket = await served.client.ws_connect(PATH)
        if how == "websocket":
            await socket.send_str(json.dumps({"type": "response.create", "input": "a", "conversation": id}))
        else:
            asking = asyncio.ensure_future(client.responses.create(model="fake", input="a", conversation=id))
        await served.ring.until(lambda: served.ring.open)
        [response] = served.ring.open
        if running:
            await asyncio.sleep(0.05)
        if how == "cancel":
            assert (await client.responses.cancel(response)).status == "cancelled"
            assert (await asking).status == "cancelled"
        elif how == "disconnect":
            asking.cancel()
        await socket.close()
        seen = await settled(served, id)
        last = seen["turns"][-1]
        assert (last["id"], last["status"]) == (response, "aborted" if how == "cancel" else "disconnected")
        assert (last["output_tokens"] > 0) == running
        assert seen["position"] == last["start"] + last["input_tokens"] + last["output_tokens"]
        stored = await client.responses.retrieve(response)
        assert (stored.status, stored.output_text, stored.model_extra["turn"]) == ("cancelled", last["text"], 2)
        served.ring.held, served.ring.pause = False, 0
        await client.responses.create(model="fake", input="b", conversation=id)
        assert prompts(served)[-1].endswith(f"user:a\nassistant:{last['text']}\nuser:b\nassistant:".encode())


async def test_a_failure_is_a_turn_too() -> None:
    async with serving() as served:
        id = await open_session(served)
        served.ring.failing = True
        assert (await served.error(PATH, {"input": "a", "conversation": id}))[0] == 500
        assert (await session_of(served, id))["turns"][0]["status"] == "failed"


async def test_a_failure_after_the_turn_is_in_the_session_is_not_retryable() -> None:
    async with serving() as served:
        cut, failed, queued = [await open_session(served) for _ in range(3)]
        asks = [(f"{SESSIONS}/{cut}/turns", {"text": "a"}), (PATH, {"input": "a", "conversation": failed})]
        served.ring.pause = 0.02
        running = [asyncio.ensure_future(served.client.post(path, json=body)) for path, body in asks]
        await served.ring.until(lambda: len(served.ring.open) == 2)
        await asyncio.sleep(0.05)
        served.ring.held = True
        waiting = asyncio.ensure_future(served.client.post(PATH, json={"input": "a", "conversation": queued}))
        await served.ring.until(lambda: len(served.ring.open) == 3)
        served.server.gateway.fail_all(errors.unavailable("the server is shutting down", "draining"))
        for ask, session in zip(running, (cut, failed), strict=True):
            answer = await ask
            assert (answer.status, answer.headers["x-should-retry"], answer.headers.get("Retry-After")) == (
                503, "false", None
            )  # fmt: skip
            assert (await session_of(served, session))["turn"] == 1
        assert "Retry-After" in (await waiting).headers and "x-should-retry" not in (await waiting).headers
        assert (await session_of(served, queued))["turn"] == 0
        served.ring.held, served.ring.failing = False, True
        for path, body in asks:
            async with served.client.post(path, json=body) as answer:
                assert (answer.status, answer.headers["x-should-retry"]) == (500, "false")


async def test_a_response_of_a_conversation_can_be_continued() -> None:
    async with serving(max_model_len=1000) as served, client_of(served) as client:
        id = await open_session(served)
        first = await client.responses.create(model="fake", input="a", conversation=id, max_output_tokens=2)
        await client.responses.create(model="fake", input="b", conversation=id, max_output_tokens=2)
        branch = await client.responses.create(model="fake", input="c", previous_response_id=first.id)
        assert prompts(served)[-1] == b"user:a\nassistant:He\nuser:c\nassistant:"
        assert branch.conversation is None
        await client.responses.create(model="fake", input="e", previous_response_id=branch.id)
        assert prompts(served)[-1] == f"user:a\nassistant:He\nuser:c\nassistant:{REPLY}\nuser:e\nassistant:".encode()


@pytest.mark.parametrize("how", ["rewound", "replaced"])
async def test_a_response_outlives_changes_of_its_session(how: str) -> None:
    async with serving(max_model_len=1000) as served, client_of(served) as client:
        id = await open_session(served)
        first = await client.responses.create(model="fake", input="a", conversation=id, max_output_tokens=2)
        second = await client.responses.create(model="fake", input="b", conversation=id, max_output_tokens=2)
        branch = await client.responses.create(model="fake", input="c", previous_response_id=first.id)
        if how == "rewound":
            await served.post(f"{SESSIONS}/{id}/rewind", {"turn": 0})
        else:
            await served.client.delete(f"{SESSIONS}/{id}")
            await open_session(served, id=id)
            for _ in range(2):
                await client.responses.create(model="fake", input="other", conversation=id)
        for before, history in (
            (first, "user:a\nassistant:He\n"),
            (second, "user:a\nassistant:He\nuser:b\nassistant:He\n"),
            (branch, f"user:a\nassistant:He\nuser:c\nassistant:{REPLY}\n"),
        ):
            await client.responses.create(model="fake", input="d", previous_response_id=before.id)
            assert prompts(served)[-1] == f"{history}user:d\nassistant:".encode()
        items = await client.responses.input_items.list(second.id, order="asc")
        assert [item.content[0].text for item in items.data] == ["a", "He", "b"]


async def test_a_refused_response_cannot_be_continued() -> None:
    async with serving() as served, client_of(served) as client:
        id = await open_session(served)
        served.ring.refusal = "queue_full"
        refused = await client.responses.create(model="fake", input="a", conversation=id, background=True)
        served.ring.refusal = None
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="fake", input="b", previous_response_id=refused.id)
        assert caught.value.code == "previous_response_not_found"


async def test_a_session_with_a_full_log_refuses_turns() -> None:
    async with serving(session_log=300, max_model_len=1000) as served, client_of(served) as client:
        id = await open_session(served)
        answers = [await client.responses.create(model="fake", input="a" * 20, conversation=id) for _ in range(2)]
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="fake", input="b", conversation=id)
        assert caught.value.code == "session_full"
        assert (await served.error(f"{SESSIONS}/{id}/turns", {"text": "b"}))[1]["code"] == "session_full"
        assert served.sessions.memory_bytes > 300
        await served.post(f"{SESSIONS}/{id}/rewind", {"turn": answers[0].model_extra["turn"] - 1})
        await client.responses.create(model="fake", input="b", conversation=id)


async def test_a_failed_save_is_reported_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    async def save(turn: OpenTurn) -> None:
        turn.settle()
        raise not_saved(OSError(errno.ENOSPC, "No space left on device"))

    monkeypatch.setattr(OpenTurn, "save", save)
    async with serving() as served, client_of(served) as client:
        id = await open_session(served)
        stream = await client.responses.create(model="fake", input="a", conversation=id, stream=True)
        last: Any = [event async for event in stream][-1]
        assert (last.type, last.response.error.code) == ("response.failed", "session_not_saved")
        assert last.response.output_text == REPLY
        with pytest.raises(openai.APIStatusError) as caught:
            await client.with_options(max_retries=1).responses.create(model="fake", input="b", conversation=id)
        whole = caught.value.response.json()
        assert (caught.value.status_code, caught.value.code) == (507, "session_not_saved")
        assert (whole["status"], whole["turn"], whole["output"][0]["content"][0]["text"]) == ("failed", 2, REPLY)
        assert [turn["status"] for turn in (await session_of(served, id))["turns"]] == ["completed", "completed"]
