"""The mover over sockets."""

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any

from baton.actors.peers.sockets import SocketMover
from baton.actors.storage.host_memory import HostStates
from baton.actors.storage.lines import HostLines
from tests.actors.storage.host import arena_of, host_states


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_mover_keeps_no_host_memory_of_a_copy_that_it_has_delivered() -> None:
    """A copy's lines are free when its last reference is gone, which must not wait for the next copy."""

    async def scenario() -> None:
        source = host_states(64)
        copy = source.room(0)
        copy.state[0].fill_(7)
        source.put(3, copy)
        arena = arena_of(HostLines(64, 64, 0), 2)
        sink, landings = HostStates(arena), asyncio.Queue[Any]()
        sink.use(source._pools, lambda nbytes: arena.take(9)[0])  # type: ignore[index]
        (reads, serves), (back, forth) = socket.socketpair(), socket.socketpair()
        here = SocketMover(sink, reads, back, lambda *pulled: landings.put_nowait(pulled))
        there = SocketMover(source, forth, serves, lambda *pulled: None)
        there.lend(1, 3, 0)
        here.pull(1, b"", 0, 0)
        ticket, landing, error, seconds = await landings.get()
        assert (ticket, error) == (1, "") and 0 < seconds < 60 and landing.state[0].unique().tolist() == [7]
        assert arena.free_lines == 1
        del landing
        await asyncio.to_thread(wait_for, lambda: arena.free_lines == 2)
        fenced = [asyncio.Event(), asyncio.Event()]
        for mover, event in zip((here, there), fenced, strict=True):
            mover.close(event.set)
        for event in fenced:
            await event.wait()

    asyncio.run(scenario())


def test_the_fence_does_not_wait_for_a_copy_that_the_peer_wants() -> None:
    """A thread that serves may wait for its device for a minute; the promise is that a lost peer costs two seconds."""

    async def scenario() -> None:
        host = host_states(64)
        (reads, serves), (back, forth) = socket.socketpair(), socket.socketpair()
        mover = SocketMover(host, reads, back, lambda *pulled: None)
        mover.lend(1, 3, 0)  # The device never makes the copy 3.
        forth.sendall((1).to_bytes(8, "big"))
        await asyncio.sleep(0.05)
        fenced = asyncio.Event()
        mover.close(fenced.set)
        await asyncio.wait_for(fenced.wait(), 5)
        host.complete()  # the thread that serves ends too
        serves.close()
        forth.close()

    asyncio.run(scenario())
