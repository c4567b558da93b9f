"""Messages of websockets count towards --bytes-in-flight from their first byte until they are answered."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import ClientWebSocketResponse, WSCloseCode, WSMsgType

from baton.api.connections.frames import LEAST
from baton.api.responses import websocket
from tests.api.connections.test_connections import MIB, Peer, connections, peer, until, until_held
from tests.api.fake_ring import Served, serving

pytestmark = pytest.mark.anyio
PATH = "/v1/responses"
ENDS = ("error", "response.completed", "response.incomplete", "response.failed")
SIZE = 100_000
TEXT, BINARY, CONTINUATION, PING = 1, 2, 0, 9
HANDSHAKE = (
    f"GET {PATH} HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
).encode()


def create(size: int = SIZE, **more: Any) -> str:
    """Return an event that creates a response, padded to `size` bytes."""
    event = json.dumps({"type": "response.create", "input": "a", **more})
    return event[:-1] + " " * (size - len(event)) + "}"


def frame(payload: bytes, opcode: int = TEXT, fin: bool = True) -> bytes:
    """Return a frame from a client, whose mask changes nothing."""
    length = b"\xff" + len(payload).to_bytes(8, "big") if len(payload) > 125 else bytes([0x80 | len(payload)])
    return bytes([fin << 7 | opcode]) + length + bytes(4) + payload


def write(socket: ClientWebSocketResponse, data: bytes) -> None:
    """Write raw bytes to a websocket."""
    socket._writer.transport.write(data)


async def until_free(served: Served) -> None:
    await until(lambda: connections(served).held == 0)


async def last_event(socket: ClientWebSocketResponse) -> Any:
    """Receive events until the end of a response, or an error. Return the last one."""
    while (event := json.loads((await socket.receive(10)).data))["type"] not in ENDS:
        pass
    return event


@asynccontextmanager
async def running(served: Served) -> AsyncIterator[ClientWebSocketResponse]:
    """Open a websocket with one response running and one waiting, whose messages both count."""
    served.ring.held = True
    async with served.client.ws_connect(PATH) as socket:
        await socket.send_str(create())
        await socket.send_str(create())
        await served.ring.until(served.ring.submitted)
        await until_held(served, 2 * SIZE)
        assert connections(served).held < 2.1 * SIZE
        yield socket


async def test_a_message_counts_until_its_response_is_over() -> None:
    async with serving() as served, running(served) as socket:
        served.ring.release()
        served.ring.held = True
        assert (await last_event(socket))["type"] == "response.completed"
        await until(lambda: len(served.ring.submitted()) == 2)
        assert SIZE <= connections(served).held < 1.1 * SIZE
        served.ring.release()
        assert (await last_event(socket))["type"] == "response.completed"
        await until_free(served)


async def test_a_client_that_closes_during_a_response_gives_its_bytes_back() -> None:
    async with serving() as served:
        async with running(served) as socket:
            await socket.close()
            await until_free(served)
        assert len(served.ring.submitted()) == len(served.ring.aborted()) == 1


async def test_a_client_that_vanishes_during_a_response_gives_its_bytes_back() -> None:
    async with serving() as served, running(served) as socket:
        write(socket, frame(b" " * SIZE, fin=False))
        await until_held(served, 3 * SIZE)
        socket._writer.transport.abort()
        await until_free(served)


@pytest.mark.parametrize("leave", ["close", "abort"])
async def test_fragments_that_never_end_count_until_the_connection_closes(leave: str) -> None:
    """The client closes with a frame between the fragments, or without one."""
    async with serving() as served, served.client.ws_connect(PATH) as socket:
        data = frame(b"{}")  # It is handled while the fragments arrive.
        for opcode in (TEXT, CONTINUATION, CONTINUATION):
            data += frame(b" " * SIZE, opcode, fin=False) + frame(b"", PING)
        write(socket, data)
        assert (await last_event(socket))["status"] == 400
        await until_held(served, 3 * SIZE)
        assert connections(served).held < 3.1 * SIZE
        if leave == "close":
            await socket.close()
        else:
            socket._writer.transport.abort()
        await until_free(served)


async def test_a_message_that_is_handled_leaves_the_next_one_counted() -> None:
    async with serving() as served, served.client.ws_connect(PATH) as socket:
        write(socket, frame(b"{}") + frame(b" " * SIZE, fin=False))
        assert (await last_event(socket))["status"] == 400
        await until_held(served, SIZE)
        write(socket, frame(b"[]", CONTINUATION))
        assert "JSON object" in (await last_event(socket))["error"]["message"]
        await until_free(served)


async def test_pings_and_pongs_are_handled_and_count_no_longer() -> None:
    async with serving(ping_interval=0.01) as served, served.client.ws_connect(PATH, autoping=False) as socket:
        write(socket, frame(b"x" * 100, PING) * 50)
        pongs = 0
        for _ in range(200):  # The server sends pings too.
            message = await socket.receive(10)
            pongs += message.type is WSMsgType.PONG
            if message.type is WSMsgType.PING:
                await socket.pong()
        assert pongs == 50
        await until(lambda: connections(served).held <= LEAST)


@pytest.mark.parametrize("message", ["{", '{"type": "response.cancel"}', "unknown", "field"])
async def test_a_message_with_an_error_counts_no_longer(message: str) -> None:
    padded = {"unknown": create(type="x"), "field": create(nonsense=1)}.get(message, message + " " * SIZE)
    async with serving() as served, served.client.ws_connect(PATH) as socket:
        served.ring.held = True
        await socket.send_str(create(stream_id="other"))
        await until_held(served, SIZE)
        await socket.send_str(padded)
        assert (await last_event(socket))["status"] == 400
        await until(lambda: connections(served).held < 1.1 * SIZE)
        assert connections(served).held >= SIZE


async def test_a_response_that_fails_in_the_ring_gives_its_bytes_back() -> None:
    async with serving() as served, running(served) as socket:
        served.ring.failing = True
        served.ring.release()
        for _ in range(2):
            assert (await last_event(socket))["type"] in ("error", "response.failed")
        await until_free(served)


async def test_an_error_of_the_server_gives_the_bytes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = asyncio.Event()

    async def start(*_: object) -> None:
        await failing.wait()
        raise RuntimeError("a planted error")

    monkeypatch.setattr(websocket, "start_response", start)
    async with serving() as served, served.client.ws_connect(PATH) as socket:
        await socket.send_str(create())
        await until_held(served, SIZE)
        failing.set()
        error = await last_event(socket)
        assert (error["status"], error["error"]["code"]) == (500, "internal_error")
        await until_free(served)


async def test_a_shutdown_gives_the_bytes_back() -> None:
    async with serving() as served, running(served) as socket:
        write(socket, frame(b" " * SIZE, fin=False))
        await until_held(served, 3 * SIZE)
        closing = asyncio.ensure_future(served.client.server.app.shutdown())
        while (message := await socket.receive(10)).type is WSMsgType.TEXT:
            pass
        assert (message.type, message.data) == (WSMsgType.CLOSE, WSCloseCode.GOING_AWAY)
        await closing
        await until_free(served)


async def test_the_largest_websocket_gets_the_error_and_others_are_served() -> None:
    async with (
        serving(bytes_in_flight=4 * MIB, body_limit=2 * MIB) as served,
        served.client.ws_connect(PATH) as greedy,
        served.client.ws_connect(PATH) as modest,
    ):
        served.ring.held = True
        await modest.send_str(create(MIB))
        await modest.send_str(create(100))
        await until_held(served, MIB)
        for _ in range(2):
            await greedy.send_str(create(3 * MIB // 2, stream_id="x"))
        [error, closed] = [message async for message in events(greedy) if message[0] != "response.created"]
        assert error == ("error", 503, "too_many_bytes")
        assert closed == ("close", WSCloseCode.TRY_AGAIN_LATER)
        assert MIB <= connections(served).held < 1.1 * MIB
        assert connections(served).ended == {"bytes": 1}
        served.ring.release()
        for _ in range(2):
            assert (await last_event(modest))["type"] == "response.completed"
        await until_free(served)
        assert served.server.gateway.open_requests == 0


async def events(socket: ClientWebSocketResponse) -> AsyncIterator[tuple[Any, ...]]:
    """Receive until the socket is closed. Yield the type of each event, an error's status and code, and the close."""
    while (message := await socket.receive(10)).type is WSMsgType.TEXT:
        event = json.loads(message.data)
        yield (event["type"], event["status"], event["error"]["code"]) if "error" in event else (event["type"],)
    yield message.type.name.lower(), message.data


async def test_a_client_that_goes_on_sending_reads_the_error() -> None:
    """The server must not close a socket with unread bytes: the client's system would drop the error."""
    async with serving(bytes_in_flight=2 * MIB, body_limit=MIB) as served, peer(served) as greedy:
        greedy.send(HANDSHAKE)
        await greedy._reader.readuntil(b"\r\n\r\n")
        sending = asyncio.ensure_future(send_without_end(greedy))
        data = await greedy.hung_up()
        sending.cancel()
        assert data.endswith(b"\x88\x02" + WSCloseCode.TRY_AGAIN_LATER.to_bytes(2, "big"))
        assert b'"status":503' in data
        assert b'"code":"too_many_bytes"' in data
        await until_free(served)


async def send_without_end(greedy: Peer) -> None:
    """Send messages that the ring is not asked to answer: they wait, because nothing reads the first one's error."""
    message = frame(create(MIB // 2, stream_id="x").encode())
    while True:
        for start in range(0, len(message), 2**16):
            greedy.send(message[start : start + 2**16])
            await greedy._writer.drain()


async def test_what_waits_is_dropped_when_the_connection_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop may read many bytes of others before it runs the handler."""
    handlers = list[websocket.Connection]()
    served_by = websocket.Connection.serve

    async def serve(self: websocket.Connection) -> None:
        handlers.append(self)
        await served_by(self)

    monkeypatch.setattr(websocket.Connection, "serve", serve)
    async with serving() as served, running(served):
        [handler], [lane] = handlers, handlers[0]._lanes.values()
        assert lane.waiting
        handler._connection.give_up()
        assert not lane.waiting
        assert connections(served).held == 0
        await served.ring.until(served.ring.aborted)


async def test_frames_that_arrive_with_the_handshake_count() -> None:
    async with serving() as served, peer(served) as hasty:
        served.ring.held = True
        hasty.send(HANDSHAKE + frame(create().encode()) + frame(b" " * SIZE, fin=False))
        await served.ring.until(served.ring.submitted)
        await until_held(served, 2 * SIZE)
        await hasty.leave()
        await until_free(served)


async def test_an_unmasked_frame_with_the_handshake_is_a_400() -> None:
    async with serving() as served, peer(served) as hasty:
        hasty.send(HANDSHAKE + b"\x81\x02{}")
        assert (await hasty.answer())[0] == 400


async def test_tiny_pieces_and_messages_count_with_their_objects() -> None:
    """A client that sends two bytes at a time makes the server keep an object of 35 bytes for each two."""
    async with serving() as served, peer(served) as tiny:
        tiny.send(HANDSHAKE)
        await tiny._reader.readuntil(b"\r\n\r\n")
        tiny.send(frame(bytes(SIZE))[:-SIZE])
        for _ in range(20):
            before = connections(served).held
            tiny.send(b"  ")
            await until_held(served, before + LEAST)


async def test_a_websocket_is_not_compressed() -> None:
    """A compressed message would be of unknown size until it is complete, and 1,000 times as large then."""
    async with serving() as served, served.client.ws_connect(PATH, compress=15) as socket:
        assert not socket.compress
        await socket.send_str(create())
        assert (await last_event(socket))["type"] == "response.completed"
