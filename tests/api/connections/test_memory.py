"""--bytes-in-flight limits memory, not only a count: the memory of a real server while clients send much.

They send large bodies over HTTP, or large messages over websockets.
"""

import asyncio
import re
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest

from tests.api.connections.test_websocket_bytes import HANDSHAKE
from tests.api.hash_traffic import make_checkpoint
from tests.api.server_process import SERVE, ServerProcess

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]
MIB = 2**20
FRAMES = 4096  # so many bytes a body is smaller than its limit, because the headers of frames count too
PIECE = 64 * 1024
# Before aiohttp pauses a client it buffers up to 512 KiB of a body, after a read of up to 256 KiB. These bytes count
# only until the server refuses the body; then aiohttp reads on, and drops them.
BUFFER = 768 * 1024


@dataclass(frozen=True)
class Load:
    """Clients that send bodies of more bytes than the server takes at once."""

    budget: int  # bytes, for --bytes-in-flight
    body: int  # bytes of one body
    clients: int
    peak: float  # bytes by which memory may grow
    rest: float  # bytes that may stay when all clients have left: pages of the heap that a small object keeps

    @property
    def refused(self) -> int:
        """The number of bodies that do not fit. All lack one byte."""
        return self.clients - self.budget // (self.body - FRAMES)


SMALL = Load(32 * MIB, 8 * MIB, 16, peak=1.5 * 32 * MIB + 16 * BUFFER, rest=16 * BUFFER)
DEFAULT = Load(256 * MIB, 15_000_000, 60, peak=1.5 * 256 * MIB, rest=100 * 10**6)


@contextmanager
def limited_server(load: Load, folder: Path) -> Iterator[ServerProcess]:
    """Start a server with a budget. Its peak of memory is counted from the end of its start."""
    options = (str(make_checkpoint(folder)), "--body-limit", str(load.body)) if load is SMALL else ()
    with ServerProcess((*SERVE, *options, "--bytes-in-flight", str(load.budget))) as server:
        Path(f"/proc/{server.process.pid}/clear_refs").write_text("5")
        yield server


def memory(server: ServerProcess, kind: str) -> int:
    """Return the memory of the process in bytes. kind: VmRSS for the present, VmHWM for the peak."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.partition(f"{kind}:")[2].split()[0]) * 1024


async def begin_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, size: int) -> None:
    """Begin a request over HTTP with a body of `size` bytes."""
    writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n".encode())


async def begin_message(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, size: int) -> None:
    """Open a websocket, and begin a message of `size` bytes."""
    writer.write(HANDSHAKE)
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"\x81\xff" + size.to_bytes(8, "big") + bytes(4))


Begin: TypeAlias = Callable[[asyncio.StreamReader, asyncio.StreamWriter, int], Awaitable[None]]


async def send_unfinished(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, begin: Begin, size: int) -> None:
    """Send a body or a message except its last byte, or until the server refuses it."""
    await begin(reader, writer, size)
    left = size - 1
    while left:
        piece = min(left, PIECE)
        writer.write(b" " * piece)
        await writer.drain()
        left -= piece


@pytest.mark.parametrize("begin", [begin_body, begin_message])
@pytest.mark.parametrize("load", [SMALL, pytest.param(DEFAULT, marks=pytest.mark.soak)], ids=["small", "default"])
async def test_memory_stays_within_the_budget_and_is_given_back(tmp_path: Path, load: Load, begin: Begin) -> None:
    """The default budget, with the bundled model and the figures that docs/reliability.md shows, is a soak test."""
    with limited_server(load, tmp_path) as server:
        before = memory(server, "VmRSS")
        address = urlsplit(server.url)
        peers = [await asyncio.open_connection(address.hostname, address.port) for _ in range(load.clients)]
        sending = [send_unfinished(*peer, begin, load.body - FRAMES) for peer in peers]
        sent = await asyncio.gather(*sending, return_exceptions=True)
        assert all(each is None or isinstance(each, ConnectionError) for each in sent), sent
        await until(lambda: ended(server) == load.refused)
        grown = memory(server, "VmHWM") - before
        for _, writer in peers:
            writer.transport.abort()
        await until(lambda: memory(server, "VmRSS") - before < load.rest)
        rest = memory(server, "VmRSS") - before
        print(f"{before / MIB:.0f} MiB after the start, {grown / MIB:.0f} more at the peak, {rest / MIB:.0f} stay")
        assert grown < load.peak


def ended(server: ServerProcess) -> int:
    """Return how many connections the server has ended because too many bytes were in flight."""
    with urlopen(f"{server.url}/metrics") as response:
        found = re.search(r'baton:connections_ended_total{.*why="bytes".*} (\d+)', response.read().decode())
    return int(found[1]) if found else 0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while True:
            if await asyncio.to_thread(condition):
                return
            await asyncio.sleep(0.1)
