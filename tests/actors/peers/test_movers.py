"""Movers: copies travel whole, from any cut of memory to any other, and nothing is written or kept after the fence."""

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import torch

from baton.actors.peers.mover import Pulled
from baton.actors.peers.nixl import NixlCarrier, load_nixl, paired
from baton.actors.peers.sockets import SocketCarrier
from baton.actors.peers.threads import Carrier, ThreadedMover
from baton.actors.storage.arena import Arena
from baton.actors.storage.host_memory import HostState, HostStates
from baton.actors.storage.lines import HostLines
from baton.models.batch import TensorSpec
from tests.actors.storage.host import PAGE, arena_of, buffer, host_states

LINES = HostLines(128, 200, 32)  # a state takes two lines, and a line holds four pages
KV = TensorSpec((16,), torch.uint8)


def socket_carrier(arena: Arena) -> Carrier:
    return SocketCarrier()


def nixl_carrier(arena: Arena) -> Carrier:
    try:
        return NixlCarrier(load_nixl(), arena)
    except ImportError as error:
        pytest.skip(str(error))  # an extra: everything else works without it


MakeCarrier = Callable[[Arena], Carrier]
every_carrier = pytest.mark.parametrize("carrier", [socket_carrier, nixl_carrier])


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Engine:
    """One side of a link."""

    def __init__(self, make_carrier: MakeCarrier, lines: int = 40) -> None:
        self.arena = arena_of(LINES, lines)
        self.host = HostStates(self.arena)
        self.host.use(host_states(LINES.state_bytes, KV)._pools, buffer)
        self.carrier = make_carrier(self.arena)
        self.pulls = asyncio.Queue[tuple[int, HostState | None, str, float]]()

    def connect(self, reads: socket.socket, serves: socket.socket) -> None:
        pulled: Pulled = lambda *pull: self.pulls.put_nowait(pull)  # noqa: E731
        self.mover = ThreadedMover(self.carrier, self.host, reads, serves, pulled)

    def copy(self, key: int, position: int, first_page: int = 0) -> HostState:
        """Store a copy of random bytes under `key`."""
        copy = self.host.room(position, first_page)
        for part in (*copy.state, *copy.blocks):
            part.random_(256)
        self.host.put(key, copy)
        return copy


@asynccontextmanager
async def linked(make_carrier: MakeCarrier) -> AsyncIterator[tuple[Engine, Engine]]:
    """Yield a sink and a source; in the end both are fenced."""
    sink, source = Engine(make_carrier), Engine(make_carrier)
    (reads, serves), (back, forth) = socket.socketpair(), socket.socketpair()
    sink.connect(reads, back)
    source.connect(forth, serves)
    try:
        yield sink, source
    finally:
        fences = [asyncio.Event(), asyncio.Event()]
        source.host.complete()
        for engine, fence in zip((sink, source), fences, strict=True):
            engine.mover.close(fence.set)
        async with asyncio.timeout(10):
            for fence in fences:
                await fence.wait()


def flat(parts: tuple[torch.Tensor, ...]) -> bytes:
    return b"".join(bytes(part.contiguous().view(-1).tolist()) for part in parts)


@every_carrier
def test_a_copy_arrives_whole_without_the_pages_that_the_sink_has(carrier: MakeCarrier) -> None:
    async def scenario() -> None:
        async with linked(carrier) as (sink, source):
            pages = 9
            for ticket, (begin, first_page) in enumerate([(0, 0), (0, 1), (0, 6), (0, pages), (2, 2), (2, 5), (3, 7)]):
                copy = source.copy(ticket, pages * PAGE, begin)
                source.mover.lend(ticket, ticket, first_page)
                sink.mover.pull(ticket, b"", pages * PAGE, first_page)
                found, landing, error, seconds = await sink.pulls.get()
                assert (found, error) == (ticket, "") and landing is not None and 0 < seconds < 60
                assert flat(landing.state) == flat(copy.state)
                absent = (first_page - begin) * LINES.page_bytes
                assert flat(landing.blocks) == flat(copy.blocks)[absent:]
                source.host.drop(ticket)

    asyncio.run(scenario())


@every_carrier
def test_a_copy_that_is_not_lent_is_refused_and_the_next_one_arrives(carrier: MakeCarrier) -> None:
    async def scenario() -> None:
        async with linked(carrier) as (sink, source):
            source.copy(3, 4)
            for ticket, error in ((1, "the peer has no such copy"), (2, "")):
                if not error:
                    source.mover.lend(ticket, 3, 0)
                sink.mover.pull(ticket, b"", 4, 0)
                assert (await sink.pulls.get())[2] == error
            source.mover.withdraw(2)
            sink.mover.pull(2, b"", 4, 0)
            assert (await sink.pulls.get())[2] == "the peer has no such copy"

    asyncio.run(scenario())


@every_carrier
def test_a_mover_keeps_no_host_memory_of_a_copy_that_it_has_delivered(carrier: MakeCarrier) -> None:
    """A copy's lines are free when its last reference is gone, which must not wait for the next copy."""

    async def scenario() -> None:
        async with linked(carrier) as (sink, source):
            source.copy(3, 0)
            source.mover.lend(1, 3, 0)
            sink.mover.pull(1, b"", 0, 0)
            pull: Any = await sink.pulls.get()
            assert sink.arena.free_lines == 38
            del pull
            await asyncio.to_thread(wait_for, lambda: sink.arena.free_lines == 40)

    asyncio.run(scenario())


def test_the_fence_does_not_wait_for_a_copy_that_the_peer_wants() -> None:
    """A thread that serves may wait for its device for a minute; the promise is that a lost peer costs two seconds."""

    async def scenario() -> None:
        engine = Engine(socket_carrier)
        (reads, serves), (back, forth) = socket.socketpair(), socket.socketpair()
        engine.connect(reads, back)
        engine.mover.lend(1, 3, 0)  # The device never makes the copy 3.
        forth.sendall((1).to_bytes(8, "big"))
        await asyncio.sleep(0.05)
        fenced = asyncio.Event()
        engine.mover.close(fenced.set)
        await asyncio.wait_for(fenced.wait(), 5)
        engine.host.complete()  # the thread that serves ends too
        serves.close()
        forth.close()

    asyncio.run(scenario())


def test_a_fence_ends_the_agent_and_its_threads() -> None:
    """An agent that lives on goes on writing to memory that others use by then."""
    carrier = nixl_carrier(arena_of(LINES, 4))
    assert isinstance(carrier, NixlCarrier)
    for _ in range(3):
        before = len(os.listdir("/proc/self/task"))
        carrier._open()
        assert len(os.listdir("/proc/self/task")) > before
        carrier._fence()
        wait_for(lambda: len(os.listdir("/proc/self/task")) == before)  # noqa: B023


def test_a_failed_read_fences_before_its_memory_is_reused() -> None:
    carrier = nixl_carrier(arena_of(LINES, 4))
    assert isinstance(carrier, NixlCarrier)
    [line] = carrier._arena.take(1) or []
    part = memoryview(line.numpy()).cast("B")
    source = nixl_carrier(arena_of(LINES, 4))
    assert isinstance(source, NixlCarrier)
    source._open()
    here, there = socket.socketpair()
    with here, there:
        elsewhere = 4096, len(part)  # no registered memory of the source
        there.sendall(answer_of(source._described, elsewhere))
        with pytest.raises(OSError, match="NIXL"):
            carrier.receive(here, [part])
        assert carrier._agent is None
    carrier.close()
    source.close()


def answer_of(agent: bytes, *places: tuple[int, int]) -> bytes:
    data = msgspec.msgpack.encode((agent, places))
    return len(data).to_bytes(4, "big") + data


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ([(0, 5)], [(100, 5)], [((0, 5), (100, 5))]),
        ([(0, 5)], [(100, 2), (200, 3)], [((0, 2), (100, 2)), ((2, 3), (200, 3))]),
        ([(0, 2), (50, 3)], [(100, 4), (200, 1)], [((0, 2), (100, 2)), ((50, 2), (102, 2)), ((52, 1), (200, 1))]),
        ([], [], []),
    ],
)
def test_places_are_cut_into_pairs_of_one_size(ours: Any, theirs: Any, expected: Any) -> None:
    assert paired(ours, theirs) == expected
