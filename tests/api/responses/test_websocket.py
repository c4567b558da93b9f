"""Responses over a websocket: official and plain clients, many chats at once, slow readers, and access."""

import asyncio
import json
import random
from socket import SO_RCVBUF, SO_SNDBUF, SOL_SOCKET, socket as Socket
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import ClientWebSocketResponse, WSMsgType

from baton.actors import tokens
from baton.api.generation.outputs import MERGE_ABOVE
from baton.api.responses.websocket import OPEN_SOCKETS
from tests.api.connections.test_connections import until
from tests.api.fake_ring import Served, serving
from tests.api.through_router import not_through_router

pytestmark = pytest.mark.anyio
REPLY = "Hello, wörld."
PATH = "/v1/responses"


def last_prompt(served: Served) -> bytes:
    return bytes(i for i in tokens.unpack(served.ring.submitted()[-1].tokens) if i < 256)


async def create(socket: ClientWebSocketResponse, **body: Any) -> None:
    await socket.send_str(json.dumps({"type": "response.create", **body}))


async def until_end(socket: ClientWebSocketResponse) -> list[Any]:
    """Receive the events of one response, or one error."""
    events = []
    while True:
        events.append(json.loads((await socket.receive(10)).data))
        if events[-1]["type"] in ("error", "response.completed", "response.incomplete", "response.failed"):
            return events


async def test_the_official_client() -> None:
    async with serving(max_model_len=1000) as served:
        client = openai.AsyncOpenAI(base_url=f"{served.url}v1", api_key="none", max_retries=0)
        async with client, client.responses.connect() as connection:
            previous: Any = openai.omit
            for text in "ab":
                await connection.response.create(model="fake", input=text, previous_response_id=previous, store=False)
                events = []
                async for event in connection:
                    events.append(event)
                    if event.type == "response.completed":
                        break
                assert [event.sequence_number for event in events] == list(range(len(events)))
                assert events[0].type == "response.created"
                assert events[-1].response.output_text == REPLY
                previous = events[-1].response.id
            assert last_prompt(served) == f"user:a\nassistant:{REPLY}\nuser:b\nassistant:".encode()
            await connection.response.create(model="fake", input="c", previous_response_id="resp_none")
            error: Any = await connection.recv()
            assert (error.type, error.status, error.error.code) == ("error", 400, "previous_response_not_found")
            await connection.response.create(model="other", input="c")
            assert (await connection.recv()).error.code == "model_not_found"


async def test_the_official_client_in_a_conversation_cancels_and_resumes() -> None:
    async with serving(max_model_len=1000) as served:
        _, session = await served.post("/v1/sessions", {})
        client = openai.AsyncOpenAI(base_url=f"{served.url}v1", api_key="none", max_retries=0)
        served.ring.pause = 0.02
        async with client:
            async with client.responses.connect() as connection:
                await connection.response.create(model="fake", input="a", conversation=session["id"])
                created: Any = await connection.recv()
                cancel: Any = {"type": "response.cancel", "response_id": created.response.id}
                await connection.send(cancel)
                last: Any = created
                while last.type != "response.incomplete":
                    last = await connection.recv()
                assert (last.response.status, last.response.conversation.id) == ("cancelled", session["id"])
                await connection.response.create(
                    model="fake", input="b", conversation=session["id"], background=True, stream=True
                )
                first: list[Any] = [await connection.recv() for _ in range(7)]
            resume: Any = {
                "type": "response.resume",
                "response_id": first[0].response.id,
                "starting_after": first[-1].sequence_number,
            }
            async with client.responses.connect() as connection:
                await connection.send(resume)
                rest: list[Any] = [await connection.recv()]
                while rest[-1].type != "response.completed":
                    rest.append(await connection.recv())
        deltas = [event.delta for event in first + rest if event.type == "response.output_text.delta"]
        assert "".join(deltas) == rest[-1].response.output_text == REPLY
        assert rest[-1].response.model_extra["turn"] == 2


async def test_http_and_websocket_share_the_stored_responses() -> None:
    async with serving() as served, served.client.ws_connect(PATH) as socket:
        await create(socket, input="a", max_output_tokens=2)
        id = (await until_end(socket))[-1]["response"]["id"]
        _, answer = await served.post(PATH, {"input": "b", "previous_response_id": id})
        await create(socket, input="c", previous_response_id=answer["id"])
        assert (await until_end(socket))[-1]["type"] == "response.completed"
    assert last_prompt(served) == f"user:a\nassistant:He\nuser:b\nassistant:{REPLY}\nuser:c\nassistant:".encode()


async def test_invalid_events_get_errors_and_the_socket_stays_open() -> None:
    async with serving() as served, served.client.ws_connect(PATH) as socket:
        for text, code in (
            ("{", None),
            ("[]", None),
            ('{"type": "response.destroy"}', "unknown_event_type"),
            ('{"type": "response.create"}', "missing_required_parameter"),
            ('{"type": "response.create", "input": "a", "nonsense": 1}', "unknown_parameter"),
            ('{"type": "response.cancel"}', "response_not_found"),
            ('{"type": "response.cancel", "response_id": []}', "response_not_found"),
            ('{"type": "response.create", "input": "a", "stream_id": 7}', "invalid_value"),
        ):
            await socket.send_str(text)
            [error] = await until_end(socket)
            assert (error["type"], error["status"], error["error"]["code"]) == ("error", 400, code)
        served.ring.refusal = "queue_full"
        await create(socket, input="a")
        [error] = await until_end(socket)
        assert (error["status"], error["error"]["code"]) == (429, "queue_full")
        served.ring.refusal = None
        await create(socket, input="a")
        assert (await until_end(socket))[-1]["type"] == "response.completed"


async def test_cancel() -> None:
    async with serving() as served, served.client.ws_connect(PATH) as socket:
        served.ring.pause = 0.02
        await create(socket, input="a")
        first = json.loads((await socket.receive(10)).data)
        await socket.send_str(json.dumps({"type": "response.cancel", "response_id": first["response"]["id"]}))
        last = (await until_end(socket))[-1]
        assert (last["type"], last["response"]["status"]) == ("response.incomplete", "cancelled")
        await create(socket, input="b")
        await socket.receive(10)
        await socket.send_str('{"type": "response.cancel"}')
        assert (await until_end(socket))[-1]["response"]["status"] == "cancelled"


async def test_a_cancellation_right_after_the_creation() -> None:
    """It aborts the lane's first response, although that is still being prepared, and no other one."""
    async with serving() as served, served.client.ws_connect(PATH) as socket:
        served.ring.pause = 0.02
        await create(socket, input="a")
        await create(socket, input="b")
        await socket.send_str('{"type": "response.cancel"}')
        assert (await until_end(socket))[-1]["response"]["status"] == "cancelled"
        assert (await until_end(socket))[-1]["response"]["status"] == "completed"
        await socket.send_str('{"type": "response.cancel"}')
        assert (await until_end(socket))[-1]["error"]["code"] == "response_not_found"


@not_through_router
async def test_responses_that_are_not_stored_count_while_their_stream_may_continue_them() -> None:
    """The stream forgets its last response if there is no room in --response-memory."""
    async with serving(response_memory=50_000, max_model_len=100_000) as served:
        store = served.responses
        async with served.client.ws_connect(PATH) as socket:

            async def respond(text: str, previous: str | None = None) -> Any:
                await create(socket, input=text, store=False, previous_response_id=previous)
                return (await until_end(socket))[-1]

            first = await respond("a" * 20_000)
            await until(lambda: store.bytes > 20_000)
            second = await respond("a" * 10_000, first["response"]["id"])
            await until(lambda: store.bytes > 30_000)
            other = await respond("b")
            await until(lambda: store.bytes < 10_000)
            assert (await respond("c", second["response"]["id"]))["error"]["code"] == "previous_response_not_found"
            assert (await respond("c" * 20_000, other["response"]["id"]))["type"] == "response.completed"
            large = await respond("d" * 30_000)
            larger = await respond("e" * 30_000, large["response"]["id"])
            assert (await respond("f", larger["response"]["id"]))["error"]["code"] == "previous_response_not_found"
            await respond("g" * 20_000)
            await until(lambda: store.bytes > 20_000)
        await until(lambda: store.bytes == 0)


async def test_lanes() -> None:
    """Responses of one lane (`stream_id`) run one after another, responses of two lanes at the same time."""
    async with serving() as served, served.client.ws_connect(PATH) as socket:
        served.ring.pause = 0.005
        for lane, text in (("x", "1"), ("x", "2"), ("y", "3")):
            await create(socket, input=text, stream_id=lane)
        ended: list[str] = []
        seen: list[tuple[str, str]] = []
        while len(ended) < 3:
            event = json.loads((await socket.receive(10)).data)
            if event["type"] == "response.created":
                seen.append((event["stream_id"], "begin"))
            if event["type"] == "response.completed":
                seen.append((event["stream_id"], "end"))
                ended.append(event["stream_id"])
    assert [what for lane, what in seen if lane == "x"] == ["begin", "end", "begin", "end"]
    assert seen.index(("y", "begin")) < seen.index(("x", "end"))


async def test_a_client_that_leaves_aborts_what_it_waits_for() -> None:
    async with serving() as served:
        served.ring.held = True
        async with served.client.ws_connect(PATH) as socket:
            await create(socket, input="a")
            await create(socket, input="b", stream_id="other")
            await served.ring.until(lambda: len(served.ring.open) == 2)
        await served.ring.until(lambda: len(served.ring.aborted()) == 2)


@not_through_router
async def test_a_slow_reader_gets_merged_deltas() -> None:
    def small_buffer(address: Any) -> Socket:
        made = Socket(*address[:3])
        made.setsockopt(SOL_SOCKET, SO_RCVBUF, 8192)
        made.setblocking(False)
        return made

    connector = aiohttp.TCPConnector(socket_factory=small_buffer)
    async with serving(max_model_len=200_000) as served, aiohttp.ClientSession(connector=connector) as http:
        served.ring.reply = "x" * 5_000
        async with http.ws_connect(served.url + PATH[1:], max_msg_size=0) as socket:
            [at_server] = served.client.app[OPEN_SOCKETS]
            at_server.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_SNDBUF, 8192)
            await create(socket, input="a")
            await socket.receive(10)
            # The test consumes nothing, so aiohttp's client stops reading its socket, and deltas collect in the server.
            for _ in range(3000):
                if not served.ring.open:
                    break
                await asyncio.sleep(0.01)
            events = await until_end(socket)
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == events[-1]["response"]["output"][0]["content"][0]["text"] == served.ring.reply
    assert max(map(len, deltas)) > MERGE_ABOVE


async def test_pings_are_answered_and_dead_clients_are_cut_off() -> None:
    async with serving(ping_interval=0.05) as served, served.client.ws_connect(PATH, autoping=False) as socket:
        await socket.ping(b"hello")
        kinds = {(await socket.receive(10)).type for _ in range(2)}
        assert kinds == {WSMsgType.PING, WSMsgType.PONG}
        served.ring.held = True
        await create(socket, input="a")
        await served.ring.until(lambda: served.ring.open)
        await served.ring.until(served.ring.aborted)  # the client no longer answers pings


async def test_api_keys_and_subprotocols() -> None:
    async with serving(api_key=("secret",)) as served:
        key = {"Authorization": "Bearer secret"}
        for headers, status in (
            ({}, 401),
            ({"Authorization": "Bearer wrong"}, 401),
            (key | {"Origin": "https://evil.example"}, 403),
            (key | {"Host": "evil.example"}, 403),
        ):
            with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
                await served.client.ws_connect(PATH, headers=headers)
            assert caught.value.status == status
        async with served.client.get(PATH, headers=key) as response:
            assert response.status == 426
        async with served.client.ws_connect(PATH, headers=key) as socket:
            await create(socket, input="a")
            assert (await until_end(socket))[-1]["type"] == "response.completed"


async def test_two_hundred_chats_at_once() -> None:
    async with serving(max_model_len=4000) as served:
        served.ring.pause = 0.001

        async def chat(number: int) -> None:
            chance = random.Random(number)
            expected, previous = "", None
            async with served.client.ws_connect(PATH) as socket:
                for turn in range(2):
                    question, count = f"{number}.{turn}", chance.randint(1, 13)
                    await create(socket, input=question, max_output_tokens=count, previous_response_id=previous)
                    events = await until_end(socket)
                    response = events[-1]["response"]
                    text = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
                    assert text == response["output"][0]["content"][0]["text"] == REPLY[: len(text)] != ""
                    assert [event["sequence_number"] for event in events] == list(range(len(events)))
                    expected += f"user:{question}\nassistant:"
                    assert response["usage"]["input_tokens"] == len(expected.encode())
                    expected += text + "\n"
                    previous = response["id"]

        async with asyncio.TaskGroup() as tasks:
            for number in range(200):
                tasks.create_task(chat(number))
        assert len(served.ring.submitted()) == 400


async def test_shutting_down_closes_the_sockets() -> None:
    async with serving() as served, served.client.ws_connect(PATH) as socket:
        closing = asyncio.ensure_future(served.client.server.app.shutdown())
        message = await socket.receive(10)
        assert (message.type, message.data) == (WSMsgType.CLOSE, aiohttp.WSCloseCode.GOING_AWAY)
        await closing
