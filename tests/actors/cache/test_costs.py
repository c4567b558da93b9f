"""The work of the cache for each session does not grow with the number of sessions."""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest

from baton.actors.cache.below.assembly import make_cache
from baton.actors.cache.below.limits import TierLimits
from baton.actors.cache.pages import PagePool
from baton.actors.cache.radix import Node
from baton.actors.lease import Lease, Ledger
from baton.actors.messages import (
    Acquire,
    Drain,
    Drained,
    Drop,
    Export,
    Exported,
    Granted,
    Kept,
    Message,
    Name,
    SaveFromReq,
    Written,
)
from baton.actors.storage.disk import StateFile
from baton.actors.tokens import count, pack
from tests.counting import calls_of

FEW, MANY = 100, 400
CACHE = "actors/cache"
FILE = 10_000  # bytes; more than the state file of any of these sessions


class Disk:
    """A disk that delivers its answers one at a time, when no other message is left."""

    def __init__(self) -> None:
        self.answers: deque[Written] = deque()
        self.deleted = 0

    def files(self) -> Sequence[StateFile]:
        return ()

    def write(self, key: int, salt: str, tokens: bytes) -> None:
        self.answers.append(Written(key))

    def read(self, key: int, salt: str, tokens: bytes) -> None:
        raise AssertionError("no request resumes from a file here")

    def delete(self, salt: str, tokens: bytes) -> None:
        self.deleted += 1


class Watched(OrderedDict[Node[Lease], None]):
    """The nodes of a tree, with a count of how many nodes were iterated over."""

    looked_at = 0

    def __iter__(self) -> Iterator[Node[Lease]]:
        for node in super().__iter__():
            self.looked_at += 1
            yield node


class Bench:
    """A cache with stand-ins for forward and the disk, and `sessions` sessions of one turn each."""

    def __init__(
        self, sessions: int, slots: int, host: int, files: int, cap: int | None = None, pages: int = 0
    ) -> None:
        """host, files: how many copies fit into host memory and on the disk. cap: slots that sessions may keep."""
        self.disk, self.told, self.drained = Disk(), Counter[str](), False
        self._inbox: deque[Message] = deque()
        self.granted: list[Granted] = []
        limits = TierLimits(host_bytes=host, disk_bytes=files * FILE, session_slots=cap)
        self.ledger = Ledger(slots)
        self.cache = make_cache(self._send, self.ledger, PagePool(pages, 4), limits=limits, disk=self.disk)
        for number in range(sessions):
            self._turn(number)
            self.carry()

    def carry(self) -> None:
        """Deliver messages until none is left; the cache acts after each."""
        while self._inbox or self.disk.answers:
            self.receive(self._inbox.popleft() if self._inbox else self.disk.answers.popleft())

    def receive(self, message: Message) -> None:
        self.cache.receive(message)
        self.cache.act()

    def drain(self) -> None:
        self.receive(Drain())
        self.carry()
        assert self.drained
        self.ledger.close()

    def _turn(self, number: int) -> None:
        session, tokens = f"s{number}", pack([number, 1, 2])
        self.receive(Name(session, "", b""))
        self.receive(Acquire(number, tokens, 2, "", None, session))
        self.carry()
        state = self.granted.pop().state
        self.receive(SaveFromReq(number, session, state, count(tokens), tokens))

    def _send(self, to: str, message: Message) -> None:
        match message:
            case Granted():
                self.granted.append(message)
            case Export(key, state):
                self._inbox.append(Exported(key, state))
            case Kept(_, tier):
                self.told[tier] += 1
            case Drained(leaks):
                assert not leaks
                self.drained = True
            case Drop():
                pass


# For each case: where the sessions' states are when the drain begins, and which tier is short of room. The function
# maps a number of sessions to Bench's arguments (slots, host, files).
PLACES: dict[str, Callable[[int], tuple[int, int, int]]] = {
    "in host memory": lambda sessions: (8, 2 * sessions, sessions),
    "in their slots": lambda sessions: (sessions + 1, sessions, sessions),
    "in their slots, and few fit into host memory": lambda sessions: (sessions + 1, 8, sessions),
    "in host memory, and half of them fit on the disk": lambda sessions: (8, sessions, sessions // 2),
    "on the disk": lambda sessions: (8, 8, sessions),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_drain_costs_the_same_for_each_session_among_many_as_among_few(place: str) -> None:
    few, many = (Bench(sessions, *PLACES[place](sessions)) for sessions in (FEW, MANY))
    assert calls_of(many.drain, CACHE) < 1.25 * MANY / FEW * calls_of(few.drain, CACHE)
    assert many.told["disk"] >= MANY / 2 and many.disk.deleted <= 0.6 * MANY


@pytest.mark.parametrize("files", ["enough", "none left"])
def test_an_act_costs_no_more_with_many_copies_than_with_few(files: str) -> None:
    """Host memory is full of copies. All of them are written ahead, or the disk has no room for them."""
    few, many = (Bench(sessions, 8, sessions, sessions if files == "enough" else 1) for sessions in (FEW, MANY))
    acts = [calls_of(bench.cache.act, CACHE) for bench in (few, many)]
    assert acts[0] == acts[1]
    for bench in (few, many):
        assert bench.told["host"] >= FEW - 8
        bench.ledger.close()


def test_a_session_costs_the_same_among_many_as_among_few() -> None:
    """Half of the sessions fit into host memory and there is no disk, so each turn must evict a copy."""
    few, many = (calls_of(partial(live, sessions), CACHE) for sessions in (FEW, MANY))
    assert many < 1.25 * MANY / FEW * few


def test_an_act_does_not_search_for_states_while_sessions_are_within_their_share_of_slots() -> None:
    bench = Bench(MANY, MANY + 4, MANY, 0, cap=MANY)
    states = bench.cache.tree.states = Watched(bench.cache.tree.states)
    bench.cache.act()
    assert len(states) == MANY and states.looked_at <= 1
    bench.ledger.close()


def test_a_grant_looks_at_no_more_nodes_than_are_evicted_for_it() -> None:
    """Each session's state has a page of its own, and no page is free, so the grant must evict."""
    bench = Bench(MANY, MANY + 2, MANY, 0, pages=MANY)
    nodes = bench.cache.tree.nodes = Watched(bench.cache.tree.nodes)
    bench.receive(Acquire(MANY, pack([MANY, 1, 2]), 2, "", None))
    bench.carry()
    assert len(nodes) == MANY - 1 and nodes.looked_at < 10
    assert [granted.grant for granted in bench.granted] == [MANY]
    bench.ledger.close()


def live(sessions: int) -> None:
    Bench(sessions, 8, sessions // 2, 0).ledger.close()
