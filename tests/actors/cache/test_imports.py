"""States that come from peers: which pages a grant takes from the tree, and what a drain keeps."""

from itertools import count

import pytest

from baton.actors.cache.below.limits import TierLimits
from baton.actors.messages import Cancel, Drain, Drop, Lend, Loaded, Name, Offered, Unlend
from baton.actors.storage.peers import StateQuery
from baton.actors.tokens import pack
from tests.actors.cache.bench import PAGE, Bench, exported

STATE, TOKEN = 100, 10
TURN = list(range(16))
LONGER = list(range(70))


class PeersOfABench:
    """Peers that are always asked; records the calls of the cache."""

    def __init__(self) -> None:
        self.queries: dict[int, StateQuery] = {}
        self.pulled: dict[int, int] = {}  # key by ticket
        self.lent_at: dict[int, int] = {}  # position by ticket
        self.cancelled: list[int] = []
        self._tickets = count(1)

    def ask(self, query: StateQuery) -> int:
        ticket = next(self._tickets)
        self.queries[ticket] = query
        return ticket

    def cancel(self, ticket: int) -> None:
        self.cancelled.append(ticket)

    def pull(self, ticket: int, key: int) -> None:
        self.pulled[ticket] = key

    def lent(self, ticket: int, key: int, position: int) -> None:
        self.lent_at[ticket] = position

    def not_lent(self, ticket: int, why: str) -> None:
        raise AssertionError(why)


@pytest.fixture
def peers() -> PeersOfABench:
    return PeersOfABench()


def bench_with(peers: PeersOfABench, pages: int = 60) -> Bench:
    limits = TierLimits(10_000, 0, STATE, TOKEN if pages else 0, page_size=PAGE)
    return Bench(8, pages, limits=limits, peers=peers, worth_asking=20)


def offered(bench: Bench, peers: PeersOfABench, tokens: list[int]) -> int:
    """Offer the state that the last query asks for, and return the key under which the cache has it read."""
    [*_, (ticket, query)] = peers.queries.items()
    assert query.tokens == pack(tokens)
    bench.receive(Offered(ticket, query.salt, query.tokens, query.first_page))
    return peers.pulled[ticket]


def test_an_import_is_used_although_the_peer_has_borrowed_the_state_that_it_continues(peers: PeersOfABench) -> None:
    """The peer computes from this engine's own state, which leaves its slot for that; its pages stay, and are used."""
    bench = bench_with(peers)
    bench.run(TURN)
    grant = bench.ask(LONGER)
    [query] = peers.queries.values()
    assert (query.have, query.first_page) == (16, 4)
    bench.receive(Lend(900, "", pack(LONGER), 10, ""))
    exported(bench)
    assert peers.lent_at == {900: 16} and 16 not in bench.states
    bench.receive(Unlend(900))
    bench.receive(Loaded(offered(bench, peers, LONGER[:-1]), ""))
    granted = bench.granted(grant)
    assert (granted.hit.cached_tokens, granted.hit.origin) == (69, "peer")
    assert granted.fill is not None and granted.fill.first_page == 4


def test_an_import_without_its_first_pages_is_not_used_when_the_tree_has_lost_them(peers: PeersOfABench) -> None:
    bench = bench_with(peers)
    bench.run(TURN)
    grant = bench.ask(LONGER)
    key = offered(bench, peers, LONGER[:-1])
    [node] = bench.cache.tree.states
    bench.cache.allocator.drop(node)
    exported(bench)
    bench.receive(Loaded(key, ""))
    assert bench.granted(grant).hit.cached_tokens == 0 and not bench.cache.tiers.figures()["host_bytes"]


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_a_copy_that_lands_while_the_engine_drains_stays_only_with_a_name(
    peers: PeersOfABench, late: bool, named: bool
) -> None:
    """A request is cancelled while its state is read from a peer, and the state arrives all the same.

    late: whether the read begins after the drain, when the copies without a name have been dropped already
    """
    bench = bench_with(peers, pages=0)
    grant = bench.ask(LONGER)
    if late:
        bench.receive(Drain())
    key = offered(bench, peers, LONGER[:-1])
    bench.receive(Cancel(grant))
    if named:
        bench.receive(Name("s", "", pack(LONGER)))
    if not late:
        bench.receive(Drain())
    assert not bench.cache.tiers.idle, "the copy is still being read"
    bench.receive(Loaded(key, ""))
    assert [drop.keys for drop in bench.of(Drop)] == ([] if named else [[key]])
    assert bench.cache.tiers.figures()["host_bytes"] == (STATE if named else 0)
    assert bench.cache.tiers.idle


def test_a_copy_that_a_drain_has_released_is_released_once(peers: PeersOfABench) -> None:
    """Its read fails while the engine drains: the failure forgets the copy, and nothing is left to release."""
    bench = bench_with(peers, pages=0)
    grant = bench.ask(LONGER)
    key = offered(bench, peers, LONGER[:-1])
    bench.receive(Cancel(grant))
    bench.receive(Drain())
    bench.receive(Loaded(key, "the link has ended"))
    assert not bench.of(Drop) and bench.cache.tiers.figures()["host_bytes"] == 0
    assert bench.cache.tiers.idle
