"""Responses that outlive their connection: they run in the background, are resumed after any event, or cancelled."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from socket import SO_SNDBUF, SOL_SOCKET
from typing import Any

import openai
import pytest
from aiohttp import ClientWebSocketResponse

from baton.actors import tokens
from baton.api.responses.events import EventCursor
from tests.api.fake_ring import EOS, Served, serving
from tests.api.through_router import not_through_router

pytestmark = pytest.mark.anyio
REPLY = "Hello, wörld."
PATH = "/v1/responses"
ENDS = ("response.completed", "response.incomplete", "response.failed")
OPENING = [
    "response.created", "response.queued", "response.in_progress", "response.output_item.added",
    "response.content_part.added",
]  # fmt: skip
DELTA = "response.output_text.delta"


@asynccontextmanager
async def client_of(served: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{served.url}v1", api_key="none", max_retries=0) as client:
        yield client


async def ended(client: openai.AsyncOpenAI, id: str) -> Any:
    return await past(client, id, "queued", "in_progress")


async def past(client: openai.AsyncOpenAI, id: str, *statuses: str) -> Any:
    for _ in range(2000):
        if (response := await client.responses.retrieve(id)).status not in statuses:
            return response
        await asyncio.sleep(0.002)
    raise AssertionError(response)


async def send(socket: ClientWebSocketResponse, kind: str, **body: Any) -> None:
    await socket.send_str(json.dumps({"type": f"response.{kind}", **body}))


async def receive(socket: ClientWebSocketResponse) -> Any:
    return json.loads((await socket.receive(10)).data)


async def until_end(socket: ClientWebSocketResponse) -> list[Any]:
    events = [await receive(socket)]
    while events[-1]["type"] not in ENDS:
        events.append(await receive(socket))
    return events


def text_of(events: list[Any]) -> str:
    return "".join(event["delta"] for event in events if event["type"] == DELTA)


async def test_a_background_response_is_fetched_later() -> None:
    async with serving() as served, client_of(served) as client:
        served.ring.held = True
        queued = await client.responses.create(model="fake", input="a", background=True)
        assert (queued.status, queued.background, queued.output) == ("queued", True, [])
        await served.ring.until(lambda: served.ring.open)
        assert (await client.responses.retrieve(queued.id)).status == "queued"
        served.ring.pause = 0.01
        served.ring.release()
        assert (await past(client, queued.id, "queued")).status == "in_progress"
        response = await ended(client, queued.id)
        assert (response.status, response.output_text) == ("completed", REPLY)
        follow = await client.responses.create(model="fake", input="b", previous_response_id=queued.id)
        assert follow.status == "completed"


async def test_cancel_in_the_background() -> None:
    async with serving() as served, client_of(served) as client:
        served.ring.held = True
        queued = await client.responses.create(model="fake", input="a", background=True)
        assert (await client.responses.cancel(queued.id)).status == "cancelled"
        assert (await client.responses.retrieve(queued.id)).status == "cancelled"
        assert served.ring.open == {}


async def test_a_refused_background_response_is_stored_as_failed() -> None:
    async with serving() as served, client_of(served) as client:
        served.ring.refusal = "queue_full"
        queued = await client.responses.create(model="fake", input="a", background=True)
        failed = await ended(client, queued.id)
        assert (failed.status, str(failed.error and failed.error.code)) == ("failed", "queue_full")
        events = [event async for event in await client.responses.retrieve(queued.id, stream=True)]
        assert [event.type for event in events[2:5]] == [
            "response.in_progress", "response.output_item.added", "response.content_part.added"
        ]  # fmt: skip
        assert events[-1].type == "response.failed"


async def test_refusals_in_the_background() -> None:
    async with serving() as served:
        status, error = await served.error(PATH, {"input": "a", "background": True, "store": False})
        assert (status, error["param"]) == (400, "store")
    async with serving(response_retention=0) as served:
        status, error = await served.error(PATH, {"input": "a", "background": True})
        assert (status, error["param"]) == (400, "background")


@pytest.mark.parametrize("seen", range(0, 21, 4))
async def test_a_stream_resumes_after_the_last_event_seen(seen: int) -> None:
    """Wherever the connection drops, the rest of the stream equals what an uninterrupted reader gets."""
    async with serving() as served, client_of(served) as client:
        served.ring.pause = 0.003
        stream = await client.responses.create(model="fake", input="a", background=True, stream=True)
        first = []
        async for event in stream:
            first.append(event)
            if event.sequence_number == seen:
                break
        await stream.close()
        id = first[0].response.id
        rest = [e async for e in await client.responses.retrieve(id, stream=True, starting_after=seen)]
        whole = [e async for e in await client.responses.retrieve(id, stream=True)]
    assert [event.type for event in whole[:5]] == OPENING
    assert [event.sequence_number for event in first + rest] == list(range(len(first + rest)))
    assert [*first, *rest] == whole
    assert whole[-1].type == "response.completed" and whole[-1].response.output_text == REPLY
    assert "".join(event.delta for event in whole if event.type == DELTA) == REPLY


async def test_a_stream_cannot_resume_after_an_event_that_does_not_exist() -> None:
    async with serving() as served, client_of(served) as client:
        response = await client.responses.create(model="fake", input="a")
        for query, param in (
            ("?stream=true&starting_after=99", "starting_after"),
            ("?stream=true&starting_after=x", "starting_after"),
            (f"?stream=true&starting_after={'9' * 5000}", "starting_after"),
            (f"/input_items?limit={'0' * 5000}1", "limit"),
            ("?starting_after=1", "starting_after"),
        ):
            async with served.client.get(f"{PATH}/{response.id}{query}") as answer:
                assert (answer.status, (await answer.json())["error"]["param"]) == (400, param)


async def test_log_probabilities_are_repeated_when_read_again() -> None:
    async with serving() as served, client_of(served) as client:
        response = await client.responses.create(model="fake", input="a", top_logprobs=1, max_output_tokens=4)
        part: Any = response.output[0]
        events = [event async for event in await client.responses.retrieve(response.id, stream=True)]
        infos = [info.token for event in events if event.type == DELTA for info in event.logprobs]
        assert infos == [info.token for info in part.content[0].logprobs] == list("Hell")


async def test_another_websocket_resumes_a_response() -> None:
    async with serving() as served:
        served.ring.pause = 0.01
        async with served.client.ws_connect(PATH) as socket:
            await send(socket, "create", input="a", background=True)
            first = [await receive(socket) for _ in range(8)]
        id, seen = first[0]["response"]["id"], first[-1]["sequence_number"]
        assert served.ring.aborted() == []
        async with served.client.ws_connect(PATH) as socket:
            await send(socket, "resume", response_id=id, starting_after=seen, stream_id="lane")
            rest = await until_end(socket)
            assert {event["stream_id"] for event in rest} == {"lane"}
            assert text_of(first) + text_of(rest) == REPLY
            assert [e["sequence_number"] for e in first + rest] == list(range(len(first + rest)))
            await send(socket, "create", input="b", stream_id="lane", previous_response_id=id)
            assert (await until_end(socket))[-1]["type"] == "response.completed"
            await send(socket, "resume", response_id=id)
            again = await until_end(socket)
            assert [event["type"] for event in again[:5]] == OPENING and text_of(again) == REPLY
        assert served.ring.aborted() == []


async def test_two_readers_of_one_response() -> None:
    async with serving() as served, served.client.ws_connect(PATH) as one, served.client.ws_connect(PATH) as two:
        served.ring.pause = 0.005
        await send(one, "create", input="a", background=True)
        created = await receive(one)
        await send(two, "resume", response_id=created["response"]["id"])
        first, second = await asyncio.gather(until_end(one), until_end(two))
        assert [created, *first] == second


async def test_a_websocket_cancels_what_runs_in_the_background() -> None:
    async with serving() as served, client_of(served) as client, served.client.ws_connect(PATH) as socket:
        served.ring.held = True
        queued = await client.responses.create(model="fake", input="a", background=True)
        await send(socket, "cancel", response_id=queued.id)
        assert (await ended(client, queued.id)).status == "cancelled"
        await send(socket, "cancel", response_id=queued.id)
        assert (await receive(socket))["error"]["code"] == "response_not_found"


async def test_resuming_an_unknown_response() -> None:
    async with serving() as served, served.client.ws_connect(PATH) as socket:
        for body, status, code in (
            ({"response_id": "none"}, 404, "response_not_found"),
            ({}, 400, "missing_required_parameter"),
            ({"response_id": "none", "starting_after": -1}, 400, "invalid_value"),
            ({"response_id": "none", "after": 1}, 400, "unknown_parameter"),
        ):
            await send(socket, "resume", **body)
            error = await receive(socket)
            assert (error["type"], error["status"], error["error"]["code"]) == ("error", status, code)


async def test_without_background_a_websocket_that_drops_aborts() -> None:
    async with serving() as served, client_of(served) as client:
        served.ring.pause = 0.01
        async with served.client.ws_connect(PATH) as socket:
            await send(socket, "create", input="a")
            id = (await receive(socket))["response"]["id"]
        assert (await ended(client, id)).status == "cancelled"
        assert served.ring.aborted() == [id]


async def test_a_turn_in_the_background() -> None:
    async with serving(max_model_len=1000) as served, client_of(served) as client:
        _, session = await served.post("/v1/sessions", {})
        served.ring.pause = 0.005
        queued = await client.responses.create(model="fake", input="a", background=True, conversation=session["id"])
        with pytest.raises(openai.ConflictError):
            await client.responses.create(model="fake", input="b", conversation=session["id"])
        assert (await ended(client, queued.id)).model_extra["turn"] == 1
        await client.responses.create(model="fake", input="b", conversation=session["id"])
        sent = bytes(i for i in tokens.unpack(served.ring.submitted()[-1].tokens) if i != EOS)
    assert sent == f"user:a\nassistant:{REPLY}\nuser:b\nassistant:".encode()


async def test_a_cancel_does_not_wait_for_a_reader_that_stalls() -> None:
    async with serving(max_model_len=200_000) as served, client_of(served) as client:
        served.ring.reply = "x" * 100_000
        async with served.client.post(PATH, json={"input": "a", "top_logprobs": 2, "stream": True}) as stalled:
            for connection in served.client.server.runner._server.connections:
                connection.transport.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_SNDBUF, 8192)
            assert stalled.status == 200  # from here on, the test does not read the answer
            [id] = served.ring.open
            transcript = served.responses.get(b"", id).transcript
            written = -1
            while transcript.count != written:
                written = transcript.count
                await asyncio.sleep(0.1)
            assert served.ring.open
            async with asyncio.timeout(5):
                assert (await client.responses.cancel(id)).status == "cancelled"
            assert transcript.count > written


async def test_events_are_not_stored_one_by_one() -> None:
    """A transcript of a thousand deltas takes only the memory of their text, and of one integer for the end of each."""
    async with serving(max_model_len=10_000) as served, client_of(served) as client:
        served.ring.reply = "y" * 1000
        response = await client.responses.create(model="fake", input="a")
        transcript = served.responses.get(b"", response.id).transcript
        assert transcript.size < 5_000
        events = []
        reader = EventCursor(transcript)
        while not reader.over:
            events += await reader.next()
        assert text_of(events) == served.ring.reply


@not_through_router
async def test_the_server_ends_what_runs_in_the_background() -> None:
    async with serving() as served, client_of(served) as client:
        served.ring.held = True
        id = (await client.responses.create(model="fake", input="a", background=True)).id
        response = served.responses.get(b"", id)
        await served.client.server.app.shutdown()
        assert (response.body["status"], response.body["error"]["code"]) == ("failed", "draining")
