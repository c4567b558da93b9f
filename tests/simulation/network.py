"""The simulated network between engines: late frames, pulls, and cuts that the two ends notice at different times.

A pull reads the source's copy entry by entry, and writes to a landing buffer of the sink. As in one-sided transfers, an
abandoned pull continues to write until the mover is fenced. A freed landing buffer is used again at once.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.actors.peers.frames import Frame, decode, encode
from baton.actors.peers.link import Link
from tests.simulation.hash_device import GARBAGE, Copy

if TYPE_CHECKING:
    from tests.simulation.cluster import Engine

Action = Callable[[], None]


@dataclass(eq=False)
class Buffer:
    """A landing buffer: what a pull has written so far."""

    state: int = GARBAGE
    entries: dict[int, int] = field(default_factory=dict)  # by position


class LandingMemory:
    """The landing buffers of one engine. A freed buffer is the next to be used."""

    def __init__(self) -> None:
        self._free: list[Buffer] = []
        self.in_use: set[Buffer] = set()

    def take(self) -> Buffer:
        buffer = self._free.pop() if self._free else Buffer()
        buffer.state, buffer.entries = GARBAGE, {}
        self.in_use.add(buffer)
        return buffer

    def free(self, buffer: Buffer) -> None:
        assert buffer in self.in_use, "a landing buffer is freed twice"
        self.in_use.discard(buffer)
        self._free.append(buffer)


@dataclass(frozen=True)
class Landed:
    """A copy that a pull has read, as a mover passes it to its link."""

    position: int
    first: int  # position of the first entry
    buffer: Buffer

    def copy(self, paged: bool) -> Copy:
        entries = [self.buffer.entries.get(at, GARBAGE) for at in range(self.first, self.position)] if paged else []
        return Copy(self.buffer.state, tuple(entries), self.position, self.first if paged else 0)


@dataclass(eq=False)
class Pull:
    """A transfer under way."""

    ticket: int
    key: int  # the copy's key at the source
    landed: Landed
    at: int  # position of the entry that is read next; one before the first entry: the state is read next
    loses: bool  # whether it fails in the middle
    began: float  # on the link's clock


class PretendedMover:
    """The mover of one end of a link."""

    def __init__(self, sink: "Engine", source: "Engine", rng: random.Random, counters: Counter[str]) -> None:
        self.pulls: list[Pull] = []
        self.fencing: Action | None = None  # what to call when the fence has taken effect
        self.link: Link | None = None  # the link of the sink
        self._sink, self._source, self._rng, self._counters = sink, source, rng, counters
        self._pace = rng.choice([1.0, 0.3, 0.05])  # the probability that `actions` offers its reads, or the fence

    def lend(self, ticket: int, key: int, first_page: int) -> bytes:
        return key.to_bytes(8, "big")

    def withdraw(self, ticket: int) -> None:
        pass

    def pull(self, ticket: int, where: bytes, position: int, first_page: int) -> None:
        first = first_page * self._sink.device.page_size
        landed = Landed(position, first, self._sink.landing.take())
        assert self.link is not None
        loses, began = self._rng.random() < 0.05, self.link.now
        self.pulls.append(Pull(ticket, int.from_bytes(where, "big"), landed, first - 1, loses, began))

    def close(self, fenced: Action) -> None:
        self._counters["fenced with pulls"] += bool(self.pulls)
        self.fencing = fenced

    def actions(self) -> Iterator[Action]:
        """Yield what the mover may do next."""
        if self._rng.random() < self._pace:
            for pull in self.pulls:
                yield lambda pull=pull: self._read(pull)
        if self.fencing is not None and self._rng.random() < self._pace:
            yield self._fence

    def _read(self, pull: Pull) -> None:
        """Read the state or the next entry. If the copy is gone by now, its memory holds garbage."""
        device, landed = self._source.device, pull.landed
        if self.fencing is not None:  # The link has ended, so the source may use the memory for something else.
            landed.buffer.state = GARBAGE
            landed.buffer.entries.update(dict.fromkeys(range(landed.first, landed.position), GARBAGE))
            return
        if pull.key in device.exporting:
            return
        copy = device.vault.get(pull.key)
        if pull.at < landed.first:
            landed.buffer.state = copy.state if copy is not None else GARBAGE
        elif device.entries:
            held = copy is not None and copy.first <= pull.at < copy.position
            landed.buffer.entries[pull.at] = copy.entries[pull.at - copy.first] if held else GARBAGE
        pull.at += 1
        if pull.loses and pull.at > landed.first:
            self._end(pull, None, "injected: the transfer failed")
        elif pull.at >= landed.position or not device.entries:
            unmade = pull.key in device.unmade
            self._end(pull, None if unmade else landed, "the copy could not be made" if unmade else "")

    def _end(self, pull: Pull, landed: Landed | None, error: str) -> None:
        self.pulls.remove(pull)
        assert self.link is not None
        if self.fencing is None:
            self.link.pulled(pull.ticket, landed, error, self.link.now - pull.began)

    def _fence(self) -> None:
        fenced, self.fencing = self.fencing, None
        self.pulls.clear()
        assert fenced is not None
        fenced()


class PretendedWire:
    """One direction of a connection: frames in flight."""

    def __init__(self) -> None:
        self.frames: deque[bytes] = deque()
        self.broken = False

    def send(self, frame: Frame) -> None:
        if not self.broken:
            self.frames.append(encode(frame))


@dataclass(eq=False)
class End:
    """One end of a connection."""

    engine: "Engine"
    link: Link
    mover: PretendedMover
    incoming: PretendedWire
    open: bool = True

    def receive(self) -> None:
        self.link.receive(decode(self.incoming.frames.popleft()))

    def lose(self, why: str) -> None:
        """Notice the end of the connection."""
        self.open = False
        self.engine.peers.remove(self.link, why)


class Connection:
    """A connection between two engines, from its beginning until both ends have noticed its end."""

    number = 0

    def __init__(self, engines: tuple["Engine", "Engine"], rng: random.Random, counters: Counter[str]) -> None:
        Connection.number += 1
        one, other = engines
        wires = PretendedWire(), PretendedWire()  # wires[i] carries frames to engines[i]
        self.broken = False
        self._rng = rng
        self.ends: list[End] = []
        for sink, source, outgoing, incoming in ((one, other, wires[1], wires[0]), (other, one, wires[0], wires[1])):
            mover = PretendedMover(sink, source, rng, counters)
            link = Link(f"{source.name}#{Connection.number}", source.peers.hello, outgoing, mover, sink.peers, 0.0)
            mover.link = link
            link.beat = source.beat()
            sink.peers.add(link)
            self.ends.append(End(sink, link, mover, incoming))

    @property
    def engines(self) -> tuple["Engine", "Engine"]:
        return self.ends[0].engine, self.ends[1].engine

    @property
    def over(self) -> bool:
        """Whether both ends have noticed the end, and their movers are fenced."""
        return not any(end.open or end.mover.fencing or end.mover.pulls for end in self.ends)

    @property
    def is_pulling(self) -> bool:
        return any(end.mover.pulls for end in self.ends)

    def cut(self) -> None:
        """Break the connection. Each direction still delivers some of its frames in flight."""
        self.broken = True
        for end in self.ends:
            wire = end.incoming
            wire.broken = True
            for _ in range(self._rng.randint(0, len(wire.frames))):
                wire.frames.pop()

    def kill(self, engine: "Engine") -> None:
        """End the connection because the process of one engine is gone: its end does nothing more."""
        if not self.broken:
            self.cut()
        for end in self.ends:
            if end.engine is engine:
                end.open, end.mover.fencing = False, None
                end.mover.pulls.clear()

    def actions(self) -> Iterator[Action]:
        """Yield what may happen next on this connection."""
        for end in self.ends:
            if end.open and end.incoming.frames:
                yield end.receive
            elif end.open and self.broken:
                yield lambda end=end: end.lose("the connection was cut")
            yield from end.mover.actions()
