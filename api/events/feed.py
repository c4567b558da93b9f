"""The events of an engine for routers: its load, and which states, sessions and responses it has."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

import msgspec

from baton.actors.runtime.watching import StateWatch
from baton.api.events.frames import CachedDigest, Change, Load, Snapshot, name_of
from baton.api.events.rows import RowQueue
from baton.api.server import RingView, Server
from baton.api.sessions.by_owner import Changes, Key

INTERVAL_S = 0.1  # seconds between two checks for changes
BEAT_S = 0.5  # an event is sent at least this often
MOST_UNREAD = 256  # a router with this many unread events is disconnected; it will connect again

Frame = bytes | None  # an encoded event; None ends the connection
CutOff = Callable[[], None]


class Keeper(Protocol):
    """A store of sessions or responses, whose names are sent to routers."""

    @property
    def keys(self) -> Collection[Key]: ...

    @property
    def changes(self) -> Changes: ...

    def __contains__(self, key: Key) -> bool: ...


class Feed:
    """The events of an engine. They are made while at least one router is connected."""

    def __init__(self, server: Server, stores: Collection[Keeper]) -> None:
        self._server, self._stores = server, stores
        self._boot = secrets.token_hex(8)
        self._sequence = 0
        self._readers: dict[asyncio.Queue[Frame], CutOff] = {}
        self._watch: StateWatch | None = None
        self._looking: asyncio.Task[None] | None = None
        self._phase = server.phase  # the phase in the last event
        self._rows = RowQueue()

    @contextmanager
    def connected(self, cut_off: CutOff) -> Iterator[AsyncIterator[bytes]]:
        """Connect a router: yield its events, a snapshot first.

        cut_off: ends the connection of a router that has not read MOST_UNREAD events
        """
        queue: asyncio.Queue[Frame] = asyncio.Queue(MOST_UNREAD)
        if not self._readers:
            self._begin()
        queue.put_nowait(encoded(self._snapshot()))
        self._readers[queue] = cut_off
        try:
            yield read(queue)
        finally:
            del self._readers[queue]
            if not self._readers:
                self._end()

    async def close(self, app: object = None) -> None:
        """End all connections, because the server is shutting down."""
        self._send(None)

    def _begin(self) -> None:
        for store in self._stores:
            store.changes.begin(())
        self._looking = asyncio.create_task(self._look_again_and_again())

    def _end(self) -> None:
        for store in self._stores:
            store.changes.end()
        if self._looking is not None:
            self._looking.cancel()
        if self._watch is not None and self._server.relay is not None:
            self._server.relay.unwatch_states()
        self._looking = self._watch = None

    async def _look_again_and_again(self) -> None:
        quiet = 0.0
        while True:
            await asyncio.sleep(INTERVAL_S)
            quiet += INTERVAL_S
            if (event := self._look(quiet >= BEAT_S)) is not None:
                quiet = 0.0
                self._send(encoded(event))

    def _look(self, is_due: bool) -> Snapshot | Change | None:
        """Return the next event; None if nothing has changed and no event is due."""
        relay = self._server.relay
        watch = relay.watch_states() if relay is not None else None
        if relay is not None:
            self._rows.look(time.monotonic(), relay.running_rows(), self._waiting(relay), relay.ended_rows())
        if watch is not self._watch:  # The actors have restarted, and all states are gone.
            self._sequence += 1
            return self._snapshot()
        changed = watch.look() if watch is not None else set()
        present = [digest for digest in changed if watch is not None and digest in watch.states]
        come, gone = self._take_names()
        if not (changed or come or gone or is_due or self._phase != self._server.phase):
            return None
        self._phase = self._server.phase
        self._sequence += 1
        return Change(
            sequence=self._sequence,
            phase=self._server.phase,
            load=self._load(),
            states=described(watch, present),
            gone=[written(digest) for digest in changed.difference(present)],
            names=come,
            names_gone=gone,
        )

    def _take_names(self) -> tuple[list[str], list[str]]:
        """Return the names of new sessions and responses, and of those that are gone."""
        found: tuple[list[str], list[str]] = [], []
        for store in self._stores:
            for key in store.changes.take():
                found[key not in store].append(name_of(*key))
        return found

    def _snapshot(self) -> Snapshot:
        server = self._server
        self._watch = server.relay.watch_states() if server.relay is not None else None
        return Snapshot(
            sequence=self._sequence,
            boot=self._boot,
            name=server.config.engine_name or f"{server.config.host}:{server.config.port}",
            model=server.name,
            role=server.config.role,
            phase=server.phase,
            load=self._load(),
            states=described(self._watch, self._watch.states if self._watch is not None else ()),
            names=[name_of(*key) for store in self._stores for key in store.keys],
        )

    def _load(self) -> Load:
        server, relay = self._server, self._server.relay
        if relay is None:
            return Load()
        token = relay.token_seconds()
        return Load(
            rows=relay.running_rows(),
            waiting=self._waiting(relay),
            queue_seconds=max(server.gateway.waiting_prompt_tokens() * token, self._rows.seconds),
            token_seconds=token,
            step_seconds=relay.step_seconds(),
            slots=relay.slots_by_use(),
        )

    def _waiting(self, relay: RingView) -> int:
        return max(self._server.gateway.open_requests - relay.running_rows(), 0)

    def _send(self, frame: Frame) -> None:
        for queue, cut_off in self._readers.items():
            try:
                queue.put_nowait(frame)
            except asyncio.QueueFull:
                with suppress(asyncio.QueueEmpty):
                    while True:
                        queue.get_nowait()
                queue.put_nowait(None)
                cut_off()  # A write that waits for the router would never end.


async def read(queue: asyncio.Queue[Frame]) -> AsyncIterator[bytes]:
    """Yield events until the connection has to end."""
    while (frame := await queue.get()) is not None:
        yield frame


def encoded(event: Snapshot | Change) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


def described(watch: StateWatch | None, digests: Collection[int]) -> list[CachedDigest]:
    """Return the states with these digests in the form of events. States without a tier are left out."""
    if watch is None:
        return []
    states = ((digest, watch.states[digest]) for digest in digests)
    return [CachedDigest(written(d), state.position, state.tier) for d, state in states if state.tier is not None]


def written(digest: int) -> str:
    return f"{digest:016x}"
