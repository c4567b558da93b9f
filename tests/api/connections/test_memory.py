"""--bytes-in-flight limits memory, not only a count: the memory of a real server while clients send large bodies."""

import asyncio
import re
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest

from tests.api.hash_traffic import make_checkpoint
from tests.api.server_process import SERVE, ServerProcess

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]
MIB = 2**20
BUDGET = 32 * MIB
BODY, CLIENTS = 8 * MIB, 16  # 128 MiB, four times the budget
REFUSED = CLIENTS - BUDGET // BODY
PIECE = 64 * 1024
# Before aiohttp pauses a client it buffers up to 512 KiB of a body, after a read of up to 256 KiB. These bytes count
# only until the server refuses the body; then aiohttp reads on, and drops them.
BUFFERS = CLIENTS * 768 * 1024
PEAK = 1.5 * BUDGET + BUFFERS
# Pages of the heap that a small object keeps may stay: at most one buffer a client.
REST = BUFFERS

Send = Callable[[asyncio.StreamWriter, asyncio.StreamReader], Awaitable[None]]


@contextmanager
def small_server(folder: Path) -> Iterator[ServerProcess]:
    """Start a server with a small budget. Its peak of memory is counted from the end of its start."""
    options = (str(make_checkpoint(folder)), "--bytes-in-flight", str(BUDGET), "--body-limit", str(BODY))
    with ServerProcess((*SERVE, *options)) as server:
        Path(f"/proc/{server.process.pid}/clear_refs").write_text("5")
        yield server


def memory(server: ServerProcess, kind: str) -> int:
    """Return the memory of the process in bytes. kind: VmRSS for the present, VmHWM for the peak."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.partition(f"{kind}:")[2].split()[0]) * 1024


async def unfinished_body(writer: asyncio.StreamWriter, reader: asyncio.StreamReader) -> None:
    """Send a body except its last byte, or until the server refuses it."""
    writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {BODY}\r\n\r\n".encode())
    await send_pieces(writer, BODY - 1)


async def send_pieces(writer: asyncio.StreamWriter, left: int) -> None:
    while left:
        piece = min(left, PIECE)
        writer.write(b" " * piece)
        await writer.drain()
        left -= piece


@pytest.mark.parametrize("send", [unfinished_body], ids=["bodies"])
async def test_memory_stays_within_the_budget_and_is_given_back(tmp_path: Path, send: Send) -> None:
    with small_server(tmp_path) as server:
        before = memory(server, "VmRSS")
        address = urlsplit(server.url)
        peers = [await asyncio.open_connection(address.hostname, address.port) for _ in range(CLIENTS)]
        sent = await asyncio.gather(*(send(writer, reader) for reader, writer in peers), return_exceptions=True)
        assert all(each is None or isinstance(each, ConnectionError) for each in sent), sent
        await until(lambda: ended(server) == REFUSED)
        assert memory(server, "VmHWM") - before < PEAK
        for _, writer in peers:
            writer.transport.abort()
        await until(lambda: memory(server, "VmRSS") - before < REST)


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
