"""Hostile clients: fuzzed requests, and connections that are slow, never read, send nothing, vanish, or break HTTP."""

import asyncio
import itertools
import json
import re
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from random import Random

from tests.fuzz.client import Client
from tests.fuzz.oracles import complaint
from tests.fuzz.requests import draw
from tests.reliability.lives import HOSTILE, PATIENCE_S, UNREAD_S, Lives

STATUS = re.compile(rb"HTTP/1\.\d (\d{3})")
FULL_DISK = 507
SMALL_BUFFER = 4096
BIG_BODY = 900_000
CHAT = json.dumps({"messages": [{"role": "user", "content": "a"}], "max_tokens": 24}).encode()
LARGE_ANSWER = json.dumps({"tokens": [97] * 60_000}).encode()
PAUSE_S = 0.1


# Requests drawn from the Structs


async def send_fuzzed(lives: Lives, seed: int, numbers: Iterator[int]) -> None:
    """Send fuzzed requests until cancelled. All workers share `numbers`, so each request is sent once."""
    clients: dict[int, Client] = {}
    for number in numbers:
        await asyncio.sleep(Random(number).uniform(0, PAUSE_S))
        life = await lives.current()
        client = clients.setdefault(life, Client(*lives.address(), key=HOSTILE))
        request = draw(seed, number)
        try:
            async with asyncio.timeout(PATIENCE_S):
                answer = await client.send(request)
        except TimeoutError:
            lives.figures.complain(f"fuzzed request {number} of seed {seed}: no answer within {PATIENCE_S:g} s")
            continue
        status = answer.status if answer is not None else 0
        if lives.is_over(life):
            lives.figures.answered("fuzzed", None)
            continue
        lives.figures.answered("fuzzed" if answer is not None else "fuzzed, leaves", status)
        if status > 0 and status != FULL_DISK and (what := complaint(request, answer, exact=True)):
            lives.figures.complain(f"fuzzed request {number} of seed {seed}: {what}")


# Raw connections


class Peer:
    """A raw connection to the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.received = b""  # the last 256 KiB that the server has sent

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    def post(self, body: bytes, path: str = "/v1/chat/completions", length: int | None = None) -> None:
        self.send(b"POST %s HTTP/1.1\r\n%sContent-Length: %d\r\n\r\n" % (path.encode(), HEAD, length or len(body)))
        self.send(body)

    async def until_let_go(self) -> None:
        """Read until the server closes the connection."""
        while data := await self._reader.read(2**16):
            self.received = (self.received + data)[-(2**18) :]

    async def is_let_go(self, seconds: float) -> bool:
        """Return whether the server closes the connection within this time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.until_let_go()
                return True
        return False

    async def upgrade(self) -> None:
        """Make the connection a websocket."""
        key = b"Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\nSec-WebSocket-Version: 13\r\n"
        self.send(b"GET /v1/responses HTTP/1.1\r\n%sConnection: Upgrade\r\nUpgrade: websocket\r\n%s\r\n" % (HEAD, key))
        self.received = await self._reader.readuntil(b"\r\n\r\n")

    def vanish(self) -> None:
        self._writer.transport.abort()


HEAD = b"Host: localhost\r\nContent-Type: application/json\r\nAuthorization: Bearer %s\r\n" % HOSTILE.encode()


async def half_headers(peer: Peer, random: Random) -> None:
    """Send only part of the headers."""
    peer.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: local")


async def trickled_headers(peer: Peer, random: Random) -> None:
    """Send headers without end, slowly."""
    peer.send(b"GET /health HTTP/1.1\r\n")
    while not await peer.is_let_go(0.1):
        peer.send(b"X-A: a\r\n")


async def half_body(peer: Peer, random: Random) -> None:
    """Send only part of a body."""
    peer.post(b'{"messages": [' + b" " * random.choice([0, BIG_BODY]), length=BIG_BODY + 100)


async def trickled_body(peer: Peer, random: Random) -> None:
    """Send a body very slowly."""
    peer.post(b'{"messages": [', length=1000)
    while not await peer.is_let_go(0.1):
        peer.send(b" ")


async def never_reads(peer: Peer, random: Random) -> None:
    """Request large answers and do not read them."""
    for _ in range(12):  # More requests would reach the limit of bytes in flight before the unread timeout.
        peer.post(LARGE_ANSWER, "/detokenize")
    await asyncio.sleep(UNREAD_S * 2)


async def idle(peer: Peer, random: Random) -> None:
    """Send one request or none, and then nothing."""
    if random.random() < 0.5:
        peer.post(CHAT)


async def pipelined_and_gone(peer: Peer, random: Random) -> None:
    """Send many requests at once, and vanish."""
    for _ in range(random.randint(2, 40)):
        peer.post(CHAT)
    await asyncio.sleep(random.uniform(0, 0.5))
    peer.vanish()


async def unmasked_frame(peer: Peer, random: Random) -> None:
    """Send a websocket frame without a mask, which the protocol forbids."""
    await peer.upgrade()
    peer.send(b"\x81\x02{}")


async def half_frame(peer: Peer, random: Random) -> None:
    """Send part of a websocket frame."""
    await peer.upgrade()
    peer.send(b"\x81\xff" + BIG_BODY.to_bytes(8, "big") + b"mask" + bytes(random.choice([10, BIG_BODY - 10])))


async def many_creates(peer: Peer, random: Random) -> None:
    """Send websocket messages that wait for the first one; read no events and answer no ping."""
    await peer.upgrade()
    create = b'{"type": "response.create", "input": "a", "max_output_tokens": 24}' + b" " * random.choice(
        [10_000, BIG_BODY]
    )
    for _ in range(8):
        peer.send(b"\x81\xff" + len(create).to_bytes(8, "big") + bytes(4) + create)


async def not_http(peer: Peer, random: Random) -> None:
    """Send random bytes."""
    peer.send(random.randbytes(random.randint(1, 2000)) + b"\r\n\r\n")


KINDS: tuple[Callable[[Peer, Random], Awaitable[None]], ...] = (
    half_headers, trickled_headers, half_body, trickled_body, never_reads, idle, pipelined_and_gone, unmasked_frame,
    half_frame, many_creates, not_http,
)  # fmt: skip


async def connect_badly(lives: Lives, seed: int) -> None:
    """Open one bad connection after another until cancelled. Complain if the server does not close one in time."""
    random = Random(seed)
    while True:
        kind = random.choice(KINDS)
        life = await lives.current()
        name = kind.__name__.replace("_", " ")
        try:
            async with asyncio.timeout(PATIENCE_S):
                received = await connect(kind, *lives.address(), random)
        except TimeoutError:
            lives.figures.complain(f"{name}: still held after {PATIENCE_S:g} s")
            continue
        except OSError:
            received = b""
        statuses = [int(status) for status in STATUS.findall(received)]
        for status in statuses or [0]:
            lives.figures.answered(name, None if lives.is_over(life) and not status else status)


async def connect(kind: Callable[[Peer, Random], Awaitable[None]], host: str, port: int, random: Random) -> bytes:
    """Run a client of this kind until the server closes the connection; return the end of what the server sent."""
    own = socket.socket()
    own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
    own.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(own, (host, port))
        peer = Peer(*await asyncio.open_connection(sock=own, limit=SMALL_BUFFER))
    except BaseException:
        own.close()
        raise
    try:
        await kind(peer, random)
        await peer.until_let_go()
    except (OSError, asyncio.IncompleteReadError):
        pass
    finally:
        peer.vanish()
    return peer.received


def hostility(lives: Lives, seed: int, fuzzers: int, slow: int) -> list[Awaitable[None]]:
    """Return the tasks of all hostile clients; each runs until cancelled."""
    numbers = itertools.count()
    return [
        *(send_fuzzed(lives, seed, numbers) for _ in range(fuzzers)),
        *(connect_badly(lives, seed + number) for number in range(slow)),
    ]
