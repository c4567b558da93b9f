"""Clients that mean no good: fuzzed requests, and connections that are slow, deaf, silent, gone or broken."""

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
    """Until cancelled; each worker takes the next number."""
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


# Connections by hand


class Peer:
    """One connection. said: what the server has sent."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.said = b""

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    def post(self, body: bytes, path: str = "/v1/chat/completions", length: int | None = None) -> None:
        self.send(b"POST %s HTTP/1.1\r\n%sContent-Length: %d\r\n\r\n" % (path.encode(), HEAD, length or len(body)))
        self.send(body)

    async def until_let_go(self) -> None:
        """Until the server hangs up."""
        while data := await self._reader.read(2**16):
            self.said = (self.said + data)[-(2**18) :]

    async def hears_end(self, seconds: float) -> bool:
        """Whether the server hangs up within this time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.until_let_go()
                return True
        return False

    async def upgrade(self) -> None:
        """To a websocket."""
        key = b"Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\nSec-WebSocket-Version: 13\r\n"
        self.send(b"GET /v1/responses HTTP/1.1\r\n%sConnection: Upgrade\r\nUpgrade: websocket\r\n%s\r\n" % (HEAD, key))
        self.said = await self._reader.readuntil(b"\r\n\r\n")

    def vanish(self) -> None:
        self._writer.transport.abort()


HEAD = b"Host: localhost\r\nContent-Type: application/json\r\nAuthorization: Bearer %s\r\n" % HOSTILE.encode()


async def half_headers(peer: Peer, random: Random) -> None:
    peer.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: local")


async def trickled_headers(peer: Peer, random: Random) -> None:
    peer.send(b"GET /health HTTP/1.1\r\n")
    while not await peer.hears_end(0.1):
        peer.send(b"X-A: a\r\n")


async def half_body(peer: Peer, random: Random) -> None:
    peer.post(b'{"messages": [' + b" " * random.choice([0, BIG_BODY]), length=BIG_BODY + 100)


async def trickled_body(peer: Peer, random: Random) -> None:
    peer.post(b'{"messages": [', length=1000)
    while not await peer.hears_end(0.1):
        peer.send(b" ")


async def never_reads(peer: Peer, random: Random) -> None:
    for _ in range(12):  # More, and they would all be ended as those who hold most.
        peer.post(LARGE_ANSWER, "/detokenize")
    await asyncio.sleep(UNREAD_S * 2)


async def idle(peer: Peer, random: Random) -> None:
    if random.random() < 0.5:
        peer.post(CHAT)


async def pipelined_and_gone(peer: Peer, random: Random) -> None:
    for _ in range(random.randint(2, 40)):
        peer.post(CHAT)
    await asyncio.sleep(random.uniform(0, 0.5))
    peer.vanish()


async def unmasked_frame(peer: Peer, random: Random) -> None:
    await peer.upgrade()
    peer.send(b"\x81\x02{}")


async def half_frame(peer: Peer, random: Random) -> None:
    await peer.upgrade()
    peer.send(b"\x81\xff" + BIG_BODY.to_bytes(8, "big") + b"mask" + bytes(random.choice([10, BIG_BODY - 10])))


async def many_creates(peer: Peer, random: Random) -> None:
    """Messages that wait for the first; nothing that comes is read, and no ping is answered."""
    await peer.upgrade()
    create = b'{"type": "response.create", "input": "a", "max_output_tokens": 24}' + b" " * random.choice(
        [10_000, BIG_BODY]
    )
    for _ in range(8):
        peer.send(b"\x81\xff" + len(create).to_bytes(8, "big") + bytes(4) + create)


async def not_http(peer: Peer, random: Random) -> None:
    peer.send(random.randbytes(random.randint(1, 2000)) + b"\r\n\r\n")


KINDS: tuple[Callable[[Peer, Random], Awaitable[None]], ...] = (
    half_headers, trickled_headers, half_body, trickled_body, never_reads, idle, pipelined_and_gone, unmasked_frame,
    half_frame, many_creates, not_http,
)  # fmt: skip


async def connect_badly(lives: Lives, seed: int) -> None:
    """Until cancelled: one bad connection after another. Each is let go by the server, with an answer or without."""
    random = Random(seed)
    while True:
        kind = random.choice(KINDS)
        life = await lives.current()
        name = kind.__name__.replace("_", " ")
        try:
            async with asyncio.timeout(PATIENCE_S):
                said = await be(kind, *lives.address(), random)
        except TimeoutError:
            lives.figures.complain(f"{name}: still held after {PATIENCE_S:g} s")
            continue
        except OSError:
            said = b""
        statuses = [int(status) for status in STATUS.findall(said)]
        for status in statuses or [0]:
            lives.figures.answered(name, None if lives.is_over(life) and not status else status)


async def be(kind: Callable[[Peer, Random], Awaitable[None]], host: str, port: int, random: Random) -> bytes:
    """A client of this kind, from its beginning to its end; returns what the server said."""
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
    return peer.said


def hostility(lives: Lives, seed: int, fuzzers: int, slow: int) -> list[Awaitable[None]]:
    """All of them; each until cancelled."""
    numbers = itertools.count()
    return [
        *(send_fuzzed(lives, seed, numbers) for _ in range(fuzzers)),
        *(connect_badly(lives, seed + number) for number in range(slow)),
    ]
