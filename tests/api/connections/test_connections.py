"""Limits of connections on bytes and time: a connection that exceeds a limit is ended, and others are unaffected."""

import asyncio
import json
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import ClientSession, WSMsgType, web

from baton.api.connections.registry import CONNECTIONS, Connections
from tests.api.fake_ring import Served, serving

pytestmark = pytest.mark.anyio
CHAT = {"messages": [{"role": "user", "content": "a"}]}
MIB = 2**20


def request(body: bytes, path: str = "/v1/chat/completions", length: int | None = None) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length or len(body)}\r\n\r\n"
    return head.encode() + body


def chat(**more: Any) -> bytes:
    return request(json.dumps(CHAT | more).encode())


class Peer:
    """A client on a raw socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def answer(self) -> tuple[int, dict[str, Any]]:
        """Read one answer and return its status and body."""
        async with asyncio.timeout(10):
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
            return int(head.split()[1]), json.loads(await self._reader.readexactly(length))

    async def hung_up(self) -> bytes:
        """Read until the server closes the connection, and return the data."""
        async with asyncio.timeout(10):
            try:
                return await self._reader.read()
            except ConnectionResetError:
                return b""

    async def leave(self) -> None:
        self._writer.close()


@asynccontextmanager
async def peer(served: Served) -> AsyncIterator[Peer]:
    port = served.client.port
    assert port is not None
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Peer(reader, writer)
    finally:
        writer.transport.abort()


def connections(served: Served) -> Connections:
    assert isinstance(served.client.app, web.Application)
    return served.client.app[CONNECTIONS]


async def until_held(served: Served, held: int) -> None:
    await until(lambda: connections(served).held >= held)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


async def test_headers_that_do_not_end_are_a_408() -> None:
    async with serving(header_timeout=0.2) as served, peer(served) as slow:
        slow.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: loc")
        status, body = await slow.answer()
        assert (status, body["error"]["code"]) == (408, "headers_timeout")
        assert await slow.hung_up() == b""
        assert connections(served).ended == {"headers": 1}


async def test_headers_that_trickle_do_not_gain_time() -> None:
    async with serving(header_timeout=0.3) as served, peer(served) as slow:
        slow.send(b"GET /health HTTP/1.1\r\n")
        trickling = asyncio.ensure_future(trickle(slow, b"X-A: b\r\n"))
        status, _ = await slow.answer()
        trickling.cancel()
        assert status == 408


async def trickle(peer: Peer, line: bytes) -> None:
    while True:
        peer.send(line)
        await asyncio.sleep(0.05)


async def test_a_body_that_does_not_end_is_a_408() -> None:
    async with serving(body_timeout=0.3) as served, peer(served) as slow:
        slow.send(request(b'{"mess', length=100))
        trickling = asyncio.ensure_future(trickle(slow, b" "))
        status, body = await slow.answer()
        trickling.cancel()
        assert (status, body["error"]["code"]) == (408, "body_timeout")
        assert connections(served).held == 0


async def test_an_idle_connection_is_closed_and_a_used_one_is_not() -> None:
    async with serving(idle_timeout=0.4) as served, peer(served) as idle, peer(served) as used:
        for _ in range(4):
            used.send(chat())
            assert (await used.answer())[0] == 200
            await asyncio.sleep(0.15)
        assert await idle.hung_up() == b""
        assert await used.hung_up() == b""
        assert connections(served).ended == {"idle": 2}


async def test_an_answer_takes_longer_than_idleness() -> None:
    async with serving(idle_timeout=0.1, ping_interval=0.05) as served, peer(served) as patient:
        served.ring.pause = 0.05
        patient.send(chat())
        assert (await patient.answer())[0] == 200


async def test_a_plain_answer_that_is_not_read_is_given_up() -> None:
    async with serving(unread_timeout=0.3, max_model_len=100_000) as served, peer(served) as deaf:
        served.ring.reply = "x" * 60_000
        deaf._writer.transport.pause_reading()
        deaf.send(chat(logprobs=True, top_logprobs=2, max_tokens=90_000))
        await until(lambda: connections(served).ended["unread"] == 1)
        await until(lambda: connections(served).held == 0)


async def test_too_many_bytes_in_flight_end_the_largest_holder_only() -> None:
    async with (
        serving(bytes_in_flight=8 * MIB, body_limit=4 * MIB) as served,
        peer(served) as greedy,
        peer(served) as modest,
        peer(served) as other,
        peer(served) as last,
    ):
        half = b'{"messages": [{"role": "user", "content": "' + b"a" * 100
        modest.send(request(half, length=len(half) + 4))
        greedy.send(request(b" " * (4 * MIB - 10), length=4 * MIB))
        await until_held(served, 3 * MIB)
        other.send(request(b" " * (3 * MIB), length=4 * MIB))
        await until_held(served, 6 * MIB)
        last.send(request(b" " * (2 * MIB), length=4 * MIB))
        status, body = await greedy.answer()
        assert (status, body["error"]["code"]) == (503, "too_many_bytes")
        modest.send(b'"}]}')
        assert (await modest.answer())[0] == 200
        async with served.client.get("/health") as health:
            assert health.status == 200
        assert connections(served).ended["bytes"] == 1
        assert connections(served).held <= 8 * MIB


async def test_a_compressed_body_counts_with_its_decompressed_size() -> None:
    async with serving(bytes_in_flight=2 * MIB, body_limit=MIB) as served:
        packed = zlib.compress(b" " * (MIB - 100))
        async with peer(served) as first, peer(served) as second, peer(served) as third:
            for packing in (first, second, third):
                head = "POST /tokenize HTTP/1.1\r\nHost: a.localhost\r\nContent-Encoding: deflate\r\n"
                packing.send(f"{head}Content-Length: {len(packed) + 5}\r\n\r\n".encode() + packed[:-1])
            await until(lambda: connections(served).ended["bytes"] == 1)
            assert connections(served).held <= 2 * MIB


async def test_messages_that_wait_in_a_websocket_count() -> None:
    async with serving(bytes_in_flight=4 * MIB, body_limit=MIB) as served:
        served.ring.held = True
        async with served.client.ws_connect("/v1/responses") as socket:
            create = json.dumps({"type": "response.create", "input": "a"})
            for _ in range(6):
                await socket.send_str(create[:-1] + " " * (MIB - 200) + "}")
            async with asyncio.timeout(10):
                while (message := await socket.receive()).type is WSMsgType.TEXT:
                    pass
            assert message.type is WSMsgType.CLOSE
            assert message.data == 1013
        assert connections(served).held == 0


async def test_half_a_message_of_a_websocket_counts() -> None:
    async with serving(bytes_in_flight=2 * MIB, body_limit=MIB) as served:
        sockets = [await served.client.ws_connect("/v1/responses") for _ in range(2)]
        for socket in sockets:
            header = b"\x81\xff" + (MIB - 100).to_bytes(8, "big") + b"mask"
            socket._writer.transport.write(header + bytes(MIB - 200))
        await until_held(served, 2 * MIB - 1000)
        for socket in sockets:
            socket._writer.transport.abort()
        await until(lambda: connections(served).held == 0)


async def test_a_new_connection_takes_the_place_of_the_one_that_is_silent_longest() -> None:
    async with serving(max_connections=2) as served, peer(served) as oldest, peer(served) as busy:
        busy.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await busy.answer())[0] == 200
        async with peer(served) as new:
            new.send(chat())
            assert (await new.answer())[0] == 200
        assert await oldest.hung_up() == b""
        assert connections(served).ended["displaced"] == 1


async def test_a_request_that_has_just_arrived_is_not_displaced() -> None:
    async with serving(max_connections=1) as served, peer(served) as first:
        first.send(b"GET /health HTTP/1.1\r\n")
        await until(lambda: [each.phase for each in connections(served)._served.values()] == ["headers"])
        async with peer(served) as second:
            second.send(chat())
            assert (await second.answer())[0] == 503
        first.send(b"Host: localhost\r\n\r\n")
        assert (await first.answer())[0] == 200


async def test_one_connection_more_than_can_be_served_is_a_503() -> None:
    async with serving(max_connections=2) as served, peer(served) as first, peer(served) as second:
        served.ring.held = True
        first.send(chat())
        second.send(chat())
        await until(lambda: len(served.ring.open) == 2)
        async with peer(served) as third:
            third.send(chat())
            status, body = await third.answer()
            assert (status, body["error"]["code"]) == (503, "too_many_connections")
            assert await third.hung_up() == b""
        await first.leave()
        await served.ring.until(served.ring.aborted)
        async with ClientSession() as client, client.get(served.url + "health") as health:
            assert health.status == 200


async def test_a_closed_connection_is_not_counted_as_silent() -> None:
    """A closed connection that counted as silent would never be forgotten, and be displaced instead of a living one."""
    async with serving(max_connections=1) as served, peer(served) as gone:
        served.ring.held = True
        gone.send(chat())
        await served.ring.until(served.ring.submitted)
        await gone.leave()
        await served.ring.until(served.ring.aborted)
        await until(lambda: len(connections(served)) == 0)
        await asyncio.sleep(0.05)
        async with peer(served) as busy:
            busy.send(chat())
            await until(lambda: len(served.ring.submitted()) == 2)
            async with peer(served) as other:
                other.send(chat())
                status, body = await other.answer()
                assert (status, body["error"]["code"]) == (503, "too_many_connections")


async def test_refusals_end_though_the_refused_say_nothing() -> None:
    async with serving(max_connections=1) as served, peer(served) as first:
        served.ring.held = True
        first.send(chat())
        await served.ring.until(served.ring.submitted)
        async with peer(served) as silent:
            assert await silent.hung_up() == b""


async def test_too_many_refused_connections_are_cut_off_at_once() -> None:
    async with serving(max_connections=1) as served, peer(served) as first:
        connections(served).limits = replace(connections(served).limits, refusals=1)
        served.ring.held = True
        first.send(chat())
        await served.ring.until(served.ring.submitted)
        async with peer(served) as refused, peer(served) as cut_off:
            assert await cut_off.hung_up() == b""
            refused.send(chat())
            assert (await refused.answer())[0] == 503


@pytest.mark.parametrize("rest", [b" " * 600_000, chat() * 40], ids=["a large body", "many requests"])
async def test_a_client_that_pipelined_and_left_is_noticed(rest: bytes) -> None:
    async with serving() as served, peer(served) as pipelining:
        served.ring.held = True
        pipelining.send(chat() + (request(rest) if rest.startswith(b" ") else rest))
        await served.ring.until(served.ring.submitted)
        await asyncio.sleep(0.1)
        await pipelining.leave()
        await served.ring.until(served.ring.aborted)
        assert connections(served).ended["left"] == 1
        await until(lambda: served.server.gateway.open_requests == 0)
        known = connections(served)
        assert not (known._served or known._silent or known._refused or known.held)


async def test_an_unmasked_frame_closes_the_websocket_with_1002() -> None:
    async with serving() as served, served.client.ws_connect("/v1/responses") as socket:
        transport = socket._writer.transport
        transport.write(b"\x81\x02{}")
        message = await socket.receive(timeout=10)
        assert message.type is WSMsgType.CLOSE
        assert message.data == 1002


async def test_a_websocket_that_says_nothing_for_long_is_closed() -> None:
    async with (
        serving(websocket_timeout=0.5, ping_interval=0.1) as served,
        served.client.ws_connect("/v1/responses", autoping=False) as mute,
        served.client.ws_connect("/v1/responses") as alive,
    ):
        listening = asyncio.ensure_future(alive.receive())
        async with asyncio.timeout(10):
            while (await mute.receive()).type is WSMsgType.PING:
                pass
        assert not listening.done()
        listening.cancel()
        assert connections(served).ended["websocket"] == 1
