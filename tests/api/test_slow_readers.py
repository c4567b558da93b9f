"""Routers that do not read the events of an engine: it disconnects them, and goes on."""

import asyncio
import socket
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from baton.api.events import feed
from tests.api.fake_ring import FakeRing, Served, serving

pytestmark = pytest.mark.anyio
EVENT_BYTES = 20_000
IN_SYSTEM = 8 << 20  # bytes that the system holds for a connection at most
READERS = 4


@pytest.fixture(autouse=True)
def many_large_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "INTERVAL_S", 0.001)
    monkeypatch.setattr(feed, "BEAT_S", 0.0)
    monkeypatch.setattr(FakeRing, "slots_by_use", lambda ring: {"x" * EVENT_BYTES: 1})


@contextmanager
def silent_readers(served: Served) -> Iterator[list[socket.socket]]:
    """Connect routers that read nothing."""
    url = served.client.make_url("/v1/events")
    sockets = [socket.create_connection((url.host, url.port)) for _ in range(READERS)]
    for each in sockets:
        each.send(b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    try:
        yield sockets
    finally:
        for each in sockets:
            each.close()


def unread(reader: socket.socket) -> int:
    """Return how many bytes are left for a reader whose connection has ended."""
    reader.settimeout(10)
    size = 0
    try:
        while chunk := reader.recv(1 << 20):
            size += len(chunk)
    except ConnectionResetError:
        pass
    return size


async def test_a_router_that_does_not_read_is_disconnected() -> None:
    async with serving() as served, served.client.get("/v1/events") as events:
        tracemalloc.start()
        with silent_readers(served) as readers:
            for _ in range(4 * feed.MOST_UNREAD):
                await events.content.readuntil(b"\n\n")
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            async with asyncio.timeout(10):
                sizes = await asyncio.gather(*(asyncio.to_thread(unread, reader) for reader in readers))
        assert max(sizes) < IN_SYSTEM
        assert peak < 2 * feed.MOST_UNREAD * EVENT_BYTES, "events are shared by all who wait for them"
        for _ in range(10):
            assert (await events.content.readuntil(b"\n\n")).startswith(b"data: ")
        assert (await served.client.get("/health")).status == 200
