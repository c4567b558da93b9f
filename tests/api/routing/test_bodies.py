"""The bodies of streams between engines and clients: packets of any size, slow clients, engines that end early."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from baton.api.routing.bodies import EngineConnection, EngineConnector, begin

pytestmark = pytest.mark.anyio
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type:text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
PARTS = [b"data: 1\n\n", b"x" * 300, b"\r\n0\r\n\r\n", b"data: 2\n\n"]
BODY = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in PARTS) + b"0\r\n\r\n"
PATIENCE_S = 60


class RawEngine:
    """An engine that answers each request with the next packets, and counts its connections."""

    def __init__(self, packets: list[bytes], ends: bool = False) -> None:
        """ends: whether it closes the connection after them."""
        self.connections = 0
        self._packets, self._ends = packets, ends

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                for packet in self._packets:
                    writer.write(packet)
                    await writer.drain()
                    await asyncio.sleep(0)
                if self._ends:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()


@asynccontextmanager
async def connected(engine: RawEngine) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    async with asyncio.timeout(PATIENCE_S), aiohttp.ClientSession(connector=EngineConnector()) as http:
        yield http, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


def body_of(answer: aiohttp.ClientResponse) -> EngineConnection:
    assert answer.connection is not None
    body = answer.connection.protocol
    assert isinstance(body, EngineConnection) and body.streams
    return body


async def nothing() -> None:
    pass


async def read(http: aiohttp.ClientSession, url: str) -> list[bytes]:
    """Return the parts of a stream."""
    parts = list[bytes]()

    def take(part: bytes) -> bool:
        parts.append(part)
        return False

    async with http.get(url) as answer:
        await body_of(answer).pass_on(take, nothing)
    return parts


@pytest.mark.parametrize("size", [1, 2, 7, 100, 10_000])
async def test_the_parts_arrive_whatever_the_packets_are(size: int) -> None:
    whole = HEAD + BODY
    engine = RawEngine([whole[at : at + size] for at in range(0, len(whole), size)])
    async with connected(engine) as (http, url):
        for _ in range(3):
            assert await read(http, url) == PARTS
    assert engine.connections == 1, "the connection is kept"


async def test_a_stream_is_complete_although_its_connection_is_lost_before_it_is_read() -> None:
    async with connected(RawEngine([HEAD + BODY], ends=True)) as (http, url), http.get(url) as answer:
        body, parts = body_of(answer), list[bytes]()
        while body.transport is not None:  # noqa: ASYNC110 (a connection has no event for tests)
            await asyncio.sleep(0)
        await body.pass_on(lambda part: bool(parts.append(part)), nothing)
    assert parts == PARTS


async def test_a_stream_that_ends_early_is_the_engines_failure() -> None:
    async with connected(RawEngine([HEAD, BODY[:-5]], ends=True)) as (http, url):
        with pytest.raises(aiohttp.ClientError):
            await read(http, url)


@pytest.mark.parametrize("line", [b"x", b"-5", b"", b"5;name=value"])
async def test_a_chunk_without_a_size_is_the_engines_failure(line: bytes) -> None:
    async with connected(RawEngine([HEAD, line + b"\r\n12345\r\n"])) as (http, url):
        with pytest.raises(aiohttp.ClientPayloadError, match="no size of a chunk"):
            await read(http, url)


async def test_nothing_is_read_while_the_client_is_slow() -> None:
    part, count = b"x" * 65_536, 400
    packets = [HEAD, *([b"%x\r\n%b\r\n" % (len(part), part)] * count), b"0\r\n\r\n"]
    parts, waits, allowed = 0, 0, asyncio.Event()

    def take(part: bytes) -> bool:
        nonlocal parts
        parts += 1
        return True

    async def caught_up() -> None:
        nonlocal waits
        waits += 1
        await allowed.wait()

    async with connected(RawEngine(packets)) as (http, url), http.get(url) as answer:
        passing = asyncio.ensure_future(body_of(answer).pass_on(take, caught_up))
        while not waits:  # noqa: ASYNC110 (a callback has no event)
            await asyncio.sleep(0)
        seen = parts
        for _ in range(1000):
            await asyncio.sleep(0)
        assert parts == seen < count, "the socket is not read"
        allowed.set()
        await passing
    assert parts == count


async def test_little_is_read_before_the_client_gets_anything() -> None:
    part, count = b"x" * 65_536, 400
    packets = [HEAD, *([b"%x\r\n%b\r\n" % (len(part), part)] * count), b"0\r\n\r\n"]
    parts = list[bytes]()
    async with connected(RawEngine(packets)) as (http, url), http.get(url) as answer:
        body = body_of(answer)
        for _ in range(1000):
            await asyncio.sleep(0)
        assert 0 < len(body._arrived) < 10 * len(part)
        await body.pass_on(lambda part: bool(parts.append(part)), nothing)
    assert parts == [part] * count


async def test_a_slow_client_gets_everything_and_little_is_kept_for_it() -> None:
    part, count = b"x" * 65_536, 400
    packets = [HEAD, *([b"%x\r\n%b\r\n" % (len(part), part)] * count), b"0\r\n\r\n"]
    behind, unsent = asyncio.Event(), list[int]()

    async def relay(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        client = await begin(response, request)

        async def caught_up() -> None:
            assert request.transport is not None
            unsent.append(request.transport.get_write_buffer_size())
            behind.set()
            await client.caught_up()

        async with http.get(url) as answer:
            await body_of(answer).pass_on(client.write, caught_up)
        return response

    app = web.Application()
    app.add_routes([web.get("/", relay)])
    async with connected(RawEngine(packets)) as (http, url), TestServer(app) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=2**16)
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        await behind.wait()
        whole = await reader.read(-1)
        writer.close()
    assert whole.count(part[:100]) >= count and whole.count(b"x") == count * len(part)
    assert max(unsent) <= 2**16 + 2**18 + len(part), "a socket's read is passed on after the last pause"


async def test_a_refusal_of_the_client_ends_the_stream_and_its_connection() -> None:
    def take(part: bytes) -> bool:
        raise ConnectionResetError("the client has left")

    async with connected(RawEngine([HEAD, BODY[:20]])) as (http, url), http.get(url) as answer:
        with pytest.raises(ConnectionResetError):
            await body_of(answer).pass_on(take, nothing)


async def test_closing_an_answer_ends_the_wait_for_it() -> None:
    async with connected(RawEngine([HEAD, BODY[:20]])) as (http, url), http.get(url) as answer:
        passing = asyncio.ensure_future(body_of(answer).pass_on(lambda part: False, nothing))
        await asyncio.sleep(0)
        answer.close()
        with pytest.raises(aiohttp.ClientError):
            await passing


async def test_other_answers_are_aiohttps() -> None:
    async def echo(request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    app = web.Application()
    app.add_routes([web.post("/", echo)])
    async with TestServer(app) as server, aiohttp.ClientSession(connector=EngineConnector()) as http:
        for body in (b"", b"a", b"b" * 10**6):
            async with http.post(server.make_url("/"), data=body) as answer:
                assert await answer.read() == body
