"""States without a session's name: which are copied when they are evicted, and when a request uses the copy."""

import pytest

from baton.actors.cache.below.limits import TierLimits
from baton.actors.cache.below.prices import DISK_AT_FIRST, NEWEST, Prices
from baton.actors.cache.worth.order import Costs
from baton.actors.control import Speeds
from baton.actors.kinds import Kind
from baton.actors.lease import Place
from baton.actors.messages import Acquire, Copied, Drain, Drop, Export, Free, Granted, Return, Spare, Suspend, Want
from baton.actors.tokens import pack
from tests.actors.cache.bench import HOST, Bench, exported, take

# FAST and SLOW: computing a token takes one second. Copying a state, 100 bytes, takes 0.1 s or 100 s.
FAST, SLOW = Speeds(1.0, 1e-3), Speeds(1.0, 1.0)


def demoting(slots: int = 2, limits: TierLimits = HOST, speeds: Speeds = FAST) -> Bench:
    bench = Bench(slots, limits=limits)
    bench.receive(speeds)
    return bench


def turn(bench: Bench, tokens: list[int]) -> Granted:
    """Run a request, and complete the exports that it causes."""
    granted = bench.run(tokens)
    exported(bench)
    return granted


def copies(bench: Bench) -> dict[int, Kind]:
    """Return the kind of each copy, by the position of its state."""
    return {node.end: node.kind for node in bench.cache.tiers.store.tree.states}


def test_a_request_resumes_from_a_copy_without_a_name() -> None:
    bench = demoting()
    for token in range(4):
        turn(bench, [token] * 10)
    assert len(bench.cache.tiers.store.tree.states) == 3 and bench.ledger.counts[Place.FREE] == 1
    granted = turn(bench, [0] * 20)
    assert (granted.hit.cached_tokens, granted.hit.origin) == (10, "host")
    assert bench.counted["states_used:new"] == 0 and not any("regretted" in name for name in bench.counted)
    bench.ledger.close()


def test_a_state_is_dropped_if_computing_is_quicker() -> None:
    for speeds in (SLOW, Speeds(0.0, 0.0)):
        bench = demoting(speeds=speeds)
        for token in range(4):
            turn(bench, [token] * 10)
        assert not copies(bench) and bench.counted["evicted_states"] == 2
        assert turn(bench, [0] * 20).hit.cached_tokens == 0
        bench.ledger.close()


def test_a_copy_is_not_used_if_computing_is_as_quick() -> None:
    bench = demoting()
    for token in range(3):
        turn(bench, [token] * 10)
    bench.receive(Speeds(1.0, 0.09))
    granted = bench.granted(bench.ask([0] * 30))
    assert granted.hit.origin == "host", "the copy takes nine seconds, ten tokens ten"
    bench.receive(Return(granted.grant, granted.state))
    bench.receive(Speeds(1.0, 0.11))
    again = bench.granted(bench.ask([0] * 30))
    assert again.hit.cached_tokens == 0 and again.hit.miss_reason == "evicted"
    bench.ledger.close()


def test_a_copy_without_a_name_does_not_displace_a_session_s() -> None:
    bench = demoting(limits=TierLimits(100, 0, 100))
    bench.open("s")
    bench.run([9] * 3, session="s")
    for token in range(4):
        turn(bench, [token] * 500)
    [copy] = bench.cache.tiers.store.tree.states
    assert copy.sessions == {"s"} and not bench.of(Drop)
    bench.ledger.close()


@pytest.mark.parametrize(("first", "second"), [(500, 10), (10, 500)])
def test_the_copy_that_is_worth_more_stays(first: int, second: int) -> None:
    bench = Bench(2, limits=TierLimits(100, 0, 100), policy="worth")
    bench.receive(FAST)
    turn(bench, [1] * first)
    bench.cache.tiers.evict(next(iter(bench.cache.tree.states)))
    exported(bench)
    turn(bench, [2] * second)
    bench.cache.tiers.evict(next(iter(bench.cache.tree.states)))
    exported(bench)
    assert list(copies(bench)) == [500]
    bench.ledger.close()


def test_copies_that_a_conversation_has_passed_go_before_its_end() -> None:
    bench = demoting(slots=4, limits=TierLimits(300, 0, 100))
    for length in (10, 20, 30):
        turn(bench, [1] * length)
        frontier = next(node for node in bench.cache.tree.states if node.end == length)
        assert bench.cache.tiers.demote(frontier)
        exported(bench)
    assert copies(bench) == {10: Kind.INTERIOR, 20: Kind.LAST_END, 30: Kind.FRONTIER}
    turn(bench, [2] * 30)
    assert bench.cache.tiers.demote(next(node for node in bench.cache.tree.states if node.end == 30))
    exported(bench)
    kinds = sorted(node.kind for node in bench.cache.tiers.store.tree.states)
    assert kinds == [Kind.FRONTIER, Kind.NEW, Kind.LAST_END]
    bench.ledger.close()


def test_a_state_that_came_back_leaves_at_once_as_its_copy_exists() -> None:
    bench = demoting(slots=8)
    for _ in range(2):
        turn(bench, [1] * 10)
        [state] = [node for node in bench.cache.tree.states if node.end == 10]
        bench.cache.tiers.evict(state)
        copies_made = len(exported(bench))
        granted = bench.granted(bench.ask([1] * 20))
        assert granted.hit.origin == "host" and copies(bench) == {10: Kind.LAST_END}
        bench.receive(Copied(granted.grant))
        bench.receive(Free([granted.state], granted.grant))
    assert copies_made == 0, "it has one"
    turn(bench, [1] * 10)
    bench.cache.tiers.evict(next(iter(bench.cache.tree.states)))
    assert copies(bench) == {10: Kind.NEW}
    bench.ledger.close()


def test_a_state_above_keeps_its_kind_if_the_evicted_one_has_a_copy() -> None:
    for speeds, kind in ((FAST, Kind.LAST_END), (SLOW, Kind.FRONTIER)):
        bench = demoting(slots=8, speeds=speeds)
        turn(bench, [1] * 10)
        turn(bench, [1] * 20)
        upper, frontier = sorted(bench.cache.tree.states, key=lambda node: node.end)
        bench.cache.tiers.evict(frontier)
        assert upper.kind is kind, "where nothing is kept of the frontier, this one takes its place"
        exported(bench)
        bench.ledger.close()


def test_some_slots_are_kept_free_if_states_are_copied() -> None:
    bench = demoting(slots=64, limits=TierLimits(10_000, 0, 100))
    for token in range(70):
        turn(bench, [token] * 10)
    assert bench.ledger.counts[Place.FREE] == bench.cache.tiers.slot_reserve == 4
    grants = [bench.ask([token] * 20) for token in range(100, 104)]
    assert len({bench.granted(grant).state.slot for grant in grants}) == 4, "nobody waits for a copy"
    bench.ledger.close()


def test_a_checkpoint_gets_a_reserved_slot_if_it_is_worth_more_than_the_next_state_to_go() -> None:
    bench = demoting(slots=4, limits=TierLimits(10_000, 0, 100))
    for token in range(3):
        turn(bench, [token] * 100)
    grant = bench.ask([9] * 200)
    exported(bench)
    assert bench.ledger.counts[Place.FREE] == 1
    assert not bench.spares(grant, 10, kind=Kind.CHECKPOINT)
    assert len(bench.spares(grant, 190, kind=Kind.HUB)) == 1
    assert bench.of(Export), "and another is made free"
    bench.ledger.close()


def test_a_drain_drops_copies_without_a_name() -> None:
    bench = demoting()
    for token in range(3):
        turn(bench, [token] * 10)
    assert copies(bench)
    bench.receive(Drain())
    turn(bench, [7] * 10)
    assert not copies(bench) and bench.of(Drop)
    bench.ledger.close()


def test_an_acquire_without_a_session_waits_for_its_file() -> None:
    """The Acquire waits for its file only if reading it is quicker than computing the tokens."""
    for seconds, waits in ((1e-6, True), (1.0, False)):
        prices = Prices(Costs(), TierLimits(1000, 10_000, 100))
        prices.measured(FAST)
        prices.measured_file(1, seconds)
        assert prices.is_quicker(50, 0, in_host=False) is waits and prices.is_quicker(50, 0, in_host=True)


def test_which_copies_pay() -> None:
    prices = Prices(Costs(attend=0.1), TierLimits(150, 0, 100, 1))
    assert not prices.pays(1.0, 50, 0) and prices.is_quicker(50, 49, in_host=True), "nothing is known yet"
    prices.measured(Speeds(1.0, 0.1))
    assert prices.pays(0.9, 50, 0), "15 seconds to save 175 less 15"
    assert not prices.pays(0.09, 50, 0) and prices.pays(0.1, 50, 0)
    assert not prices.pays(0.9, 51, 0), "it would not fit into host memory"
    assert not prices.is_quicker(50, 49, in_host=True)


def test_a_disk_s_speed_is_learned() -> None:
    prices = Prices(Costs(), TierLimits())
    for _ in range(100):
        prices.measured_file(1000, 2.0)
    assert vars(prices)["_file_byte"] == pytest.approx(2e-3, rel=1e-6)
    assert 0 < NEWEST < 1 and DISK_AT_FIRST < 1e-6


def test_a_checkpoint_does_not_evict_a_state_that_is_copied_first() -> None:
    bench = demoting(slots=3)
    for token in range(3):
        bench.run([token] * 100)
        exported(bench)
    grant = bench.ask([9] * 20)
    leases = [take(bench) for _ in range(bench.ledger.counts[Place.FREE])]
    before = bench.counted["evicted_states"]
    bench.cache.receive(Want(grant, [(19, Kind.HUB)]))
    assert bench.of(Spare)[-1].denied == [19] and bench.counted["evicted_states"] == before
    bench.cache.receive(Free(leases))
    bench.ledger.close()


def test_salts_keep_their_copies_apart() -> None:
    bench = demoting()
    for token in range(3):
        turn(bench, [token] * 10)
    bench.receive(Acquire(99, pack([0] * 20), 19, "tenant", None))
    assert bench.granted(99).hit.cached_tokens == 0
    bench.receive(Copied(99))
    bench.ledger.close()


def test_rows_get_pages_while_a_state_is_copied() -> None:
    """Leaves that are not being copied give up their pages at once; the copied state's pages return with Exported."""
    bench = Bench(slots=4, pages=7, limits=HOST)
    bench.open("s")
    bench.run([1] * 8, session="s")
    bench.run([2] * 8)
    bench.receive(Suspend(1, "s"))
    assert bench.of(Export) and bench.cache.pages.free == 3
    assert bench.granted(bench.ask([3] * 14)).hit.cached_tokens == 0, "it takes four"
    waiting = bench.ask([4] * 6)
    assert waiting not in [granted.grant for granted in bench.of(Granted)], "there is none left to give"
    exported(bench)
    assert bench.granted(waiting)


def test_a_grant_that_waits_for_pages_has_not_used_the_state_that_would_move() -> None:
    """The waiting grant needs pages of another state, which must be copied first."""
    bench = Bench(slots=4, pages=9, limits=HOST)
    bench.receive(FAST)
    bench.open("s")
    bench.run([1] * 8, session="s")
    bench.run([5] * 8)
    bench.run([2] * 8)
    bench.receive(Suspend(1, "s"))
    other = bench.granted(bench.ask([9]))
    before = bench.cache.tree.uses
    waiting = bench.ask([2] * 16)
    for _ in range(5):
        bench.cache.act()
    assert waiting not in [granted.grant for granted in bench.of(Granted)]
    assert bench.cache.tree.uses == before and not bench.counted.get("states_used:new")
    bench.receive(Free([other.state], closes_grant=other.grant))
    while exported(bench):
        pass
    assert bench.granted(waiting).hit.cached_tokens == 8
