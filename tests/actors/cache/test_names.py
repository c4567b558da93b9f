"""Sessions in the cache: which state has which name, how states leave the pool, and what commands wait for."""

from collections.abc import Iterator

import pytest

from baton.actors.cache.below.copies import Presence, copy_of
from baton.actors.cache.below.limits import TierLimits
from baton.actors.grants import Fill
from baton.actors.lease import Place
from baton.actors.messages import (
    Copied,
    Donate,
    Drop,
    Export,
    Free,
    Granted,
    Kept,
    Name,
    Return,
    SaveFromReq,
    Suspend,
    Suspended,
    Unname,
)
from baton.actors.tokens import pack
from tests.actors.cache.bench import HOST, Bench, exported, take


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.ledger.close()


def test_a_turn_takes_the_session_s_name_along(bench: Bench) -> None:
    bench.open("s")
    assert bench.of(Kept) == [Kept("s", "tokens", 0)]
    bench.run([1, 2], session="s")
    assert bench.of(Kept)[-1] == Kept("s", "slot", 2)
    bench.run([1, 2, 3, 4], session="s")
    assert bench.of(Kept)[-1] == Kept("s", "slot", 4) and bench.states == [2, 4]
    assert [sorted(node.sessions) for node in bench.cache.tree.states] == [[], ["s"]]
    assert bench.counted["resumed_from_tree"] == 1
    assert "resumed_from_tokens" not in bench.counted, "there was nothing to resume from"
    bench.receive(Name("one", "", pack([8])))
    bench.run([8, 9], session="one")
    assert bench.counted["resumed_from_tokens"] == 1
    bench.receive(Unname("one"))
    bench.run([7], session="nobody opened it")
    assert bench.of(Kept)[-1].session == "one" and bench.counted["resumed_from_tree"] == 1
    bench.receive(Unname("s"))
    assert [sorted(node.sessions) for node in bench.cache.tree.states] == [[]] * 4


def test_after_a_turn_without_a_state_the_name_is_at_the_last_checkpoint_or_where_it_was() -> None:
    bench = Bench(limits=HOST)
    bench.open("s")
    granted = bench.granted(bench.ask([1, 2, 3], session="s"))
    bench.receive(Donate(granted.grant, take(bench), 2, pack([1, 2]), closes=False))
    bench.receive(Free([granted.state], closes_grant=granted.grant))
    assert bench.of(Kept)[-1] == Kept("s", "slot", 2)
    bench.receive(Suspend(1, "s"))
    exported(bench)
    later = bench.granted(bench.ask([1, 2, 3, 4], session="s"))
    bench.receive(Copied(later.grant))
    bench.receive(Donate(later.grant, take(bench), 3, pack([3]), closes=False))
    bench.receive(Free([later.state], closes_grant=later.grant))
    assert bench.of(Kept)[-1] == Kept("s", "host", 2), "the copy is its state still"
    bench.ledger.close()


def test_a_moved_state_that_returns_has_its_name_again() -> None:
    bench = Bench(slots=1)
    bench.open("s")
    bench.run([1, 2], session="s")
    granted = bench.granted(bench.ask([1, 2, 3], session="s"))
    assert granted.moved and bench.states == []
    bench.receive(Return(granted.grant, granted.state))
    assert [node.sessions for node in bench.cache.tree.states] == [{"s"}]
    assert bench.of(Kept)[-1] == Kept("s", "slot", 2)
    bench.receive(Unname("s"))
    moved = bench.granted(bench.ask([1, 2, 3], session="s"))
    bench.open("s")
    bench.receive(Return(moved.grant, moved.state))
    assert [node.sessions for node in bench.cache.tree.states] == [set()], "the name was not on it"


def test_a_name_stays_on_its_state_when_another_moves() -> None:
    """The turn resumes from an unnamed state on another path, and is returned before it starts."""
    bench = Bench(slots=2)
    bench.open("s")
    bench.run([7, 8, 9], session="s")
    bench.run([1, 2])
    granted = bench.granted(bench.ask([1, 2, 3], session="s"))
    assert granted.moved
    bench.receive(Return(granted.grant, granted.state))
    assert sorted((node.end, *node.sessions) for node in bench.cache.tree.states) == [(2,), (3, "s")]
    assert bench.of(Kept)[-1] == Kept("s", "slot", 3)


def test_a_name_returns_to_the_state_and_not_to_an_older_file() -> None:
    bench = Bench(slots=1, limits=TierLimits(110, 0, 100, 10))
    names, store = bench.cache.tiers.names, bench.cache.tiers.store
    bench.open("s")
    bench.run([1, 2], session="s")
    reserved = store.reserve("", pack([1]))
    assert reserved is not None
    older, key = reserved
    store.exported(key)
    copy_of(older).disk = Presence.PRESENT
    older.sessions.add("s")
    names.stored["s"] = older
    granted = bench.granted(bench.ask([1, 2, 3], session="s"))
    assert granted.moved
    bench.receive(Return(granted.grant, granted.state))
    assert bench.of(Kept)[-1] == Kept("s", "slot", 2) and names.in_pool["s"].end == 2


def test_a_state_with_a_second_name_does_not_move_and_is_evicted_only_when_no_other_is_leaving() -> None:
    bench = Bench(slots=1)
    bench.open("s")
    bench.run([1, 2], session="s")
    bench.receive(Name("fork", "", pack([1, 2])))
    bench.cache.tiers.exports[9] = []
    waiting = bench.ask([1, 2, 3], session="s")
    assert bench.states == [2] and len(bench.of(Granted)) == 1, "a slot is on its way"
    del bench.cache.tiers.exports[9]
    bench.cache.act()
    granted = bench.granted(waiting)
    assert (granted.moved, granted.hit.cached_tokens, granted.hit.miss_reason) == (False, 0, "evicted")
    assert bench.of(Kept)[-2:] == [Kept("fork", "tokens", 0), Kept("s", "tokens", 0)]
    bench.ledger.close()


def test_commands_of_a_session_wait_for_its_turns_to_end(bench: Bench) -> None:
    bench.open("s")
    grants = [bench.granted(bench.ask([1, 2], session="s")) for _ in range(2)]
    bench.receive(Suspend(3, "s"))
    bench.receive(Suspend(4, "other"))
    assert bench.of(Suspended) == [Suspended(4, "tokens", 0)]
    for granted in grants:
        assert len(bench.of(Suspended)) == 1
        bench.receive(SaveFromReq(granted.grant, "s", granted.state, 2, pack([1, 2])))
    assert bench.of(Suspended)[-1] == Suspended(3, "slot", 2), "there is nothing below"


def test_a_named_state_leaves_for_host_memory_and_comes_back() -> None:
    bench = Bench(slots=2, pages=8, limits=HOST)
    for token in (1, 2):
        bench.open(f"s{token}")
        bench.run([token] * 5, session=f"s{token}")
    [export] = bench.of(Export)
    assert export.position == 5 and len(export.pages) == 2
    assert bench.cache.pages.used == 2, "its pages are held for the copy"
    assert exported(bench) == [export] and bench.cache.pages.used == 0
    assert bench.of(Kept)[-1] == Kept("s1", "host", 5) and bench.counted["demotions_host"] == 1
    granted = bench.granted(bench.ask([1, 1, 1, 1, 1, 9], session="s1"))
    assert (granted.hit.cached_tokens, granted.hit.origin, granted.loan, granted.moved) == (5, "host", None, False)
    assert granted.fill == Fill(export.key, 1, 2), "the first page is still in the tree"
    assert granted.page_copy is None and bench.counted["resumed_from_host"] == 1
    bench.receive(Copied(granted.grant))
    bench.receive(SaveFromReq(granted.grant, "s1", granted.state, 6, pack([9])))
    assert bench.of(Drop) == [Drop([export.key])], "the name has moved on"
    bench.ledger.close()


def test_if_the_match_s_own_pages_block_the_grant_it_starts_above_them_from_the_copy() -> None:
    bench = Bench(slots=4, pages=3, limits=HOST)
    bench.open("s")
    bench.run([1, 2, 3, 4, 5])
    bench.run([1, 2, 3, 4, 5, 6, 7], session="s")
    bench.receive(Suspend(1, "s"))
    exported(bench)
    assert bench.states == [5] and bench.cache.pages.free == 1
    granted = bench.granted(bench.ask([1, 2, 3, 4, 5, 6, 7, 8, 9], session="s"))
    assert (granted.hit.cached_tokens, granted.hit.origin, len(granted.pages)) == (7, "host", 3) and bench.states == []
    bench.ledger.close()


def test_a_suspended_state_leaves_its_slot_and_the_answer_waits_for_the_copy() -> None:
    bench = Bench(slots=4, limits=HOST)
    bench.open("s")
    bench.run([1, 2], session="s")
    bench.receive(Suspend(3, "s"))
    assert bench.states == [] and not bench.of(Suspended) and not bench.cache.tiers.idle
    exported(bench)
    assert bench.of(Suspended) == [Suspended(3, "host", 2)] and bench.cache.tiers.idle
    node = bench.cache.tiers.store.match("", pack([1, 2]), 2)
    assert node is not None and node.sessions == {"s"}


def test_a_state_that_is_lent_is_suspended_when_the_loan_ends() -> None:
    bench = Bench(slots=4, limits=HOST)
    bench.open("s")
    bench.run([1, 2], session="s")
    other = bench.ask([1, 2, 3])
    [node] = bench.cache.tree.states
    assert not bench.cache.tiers.demote(node)
    bench.receive(Suspend(3, "s"))
    assert not bench.of(Suspended) and not bench.of(Export) and not bench.cache.tiers.idle
    bench.receive(Copied(other))
    exported(bench)
    assert bench.of(Suspended) == [Suspended(3, "host", 2)]
    bench.ledger.close()


def test_a_state_that_must_not_be_lost_stays_if_no_copy_fits() -> None:
    bench = Bench(slots=4)
    bench.open("s")
    bench.run([1, 2], session="s")
    [node] = bench.cache.tree.states
    assert not bench.cache.tiers.demote(node, may_lose=False) and bench.states == [2]
    assert bench.cache.tiers.demote(node) and bench.states == [] and node.evicted
    assert bench.of(Kept)[-1] == Kept("s", "tokens", 0)


def test_a_slot_is_kept_free_if_the_next_state_to_go_is_a_session_s() -> None:
    bench = Bench(slots=2, limits=HOST)
    for token in (1, 2):
        bench.open(f"s{token}")
        bench.run([token], session=f"s{token}")
    assert [export.position for export in exported(bench)] == [1]
    assert bench.ledger.counts[Place.FREE] == 1
    bench.run([3])
    bench.run([3, 4])
    assert not bench.of(Export) or bench.states
    none = Bench(slots=2, limits=TierLimits(99, 0, 100))
    for token in (1, 2):
        none.open(f"s{token}")
        none.run([token], session=f"s{token}")
    assert not none.of(Export) and none.states == [1, 1], "no copy would fit"
    none.run([3])
    assert none.of(Kept)[-1] == Kept("s1", "tokens", 0) and none.counted["demotions_tokens"] == 1
    full = Bench(slots=2, limits=TierLimits(100, 0, 100))
    full.open("s0")
    full.run([9], session="s0")
    full.receive(Suspend(1, "s0"))
    exported(full)
    [copy] = full.cache.tiers.store.tree.states
    full.cache.tiers.store.lend(copy)
    for token in (1, 2):
        full.open(f"s{token}")
        full.run([token], session=f"s{token}")
    assert full.states == [1, 1] and not full.of(Export), "nothing is lost for a slot that no request waits for"
    unnamed = Bench(slots=2, limits=HOST)
    unnamed.run([1])
    unnamed.run([2])
    assert not unnamed.of(Export) and unnamed.states == [1, 1], "that one can go at once"


def test_the_latest_sessions_keep_their_slots_within_the_limit() -> None:
    bench = Bench(slots=8, limits=TierLimits(1000, 0, 100, session_slots=2))
    for token in (1, 2, 3):
        bench.open(f"s{token}")
        bench.run([token], session=f"s{token}")
    bench.run([4])
    assert [export.position for export in exported(bench)] == [1] and bench.of(Kept)[-1] == Kept("s1", "host", 1)
    assert len(bench.states) == 3


def test_a_fork_is_named_on_the_deepest_state() -> None:
    bench = Bench(slots=4, limits=HOST)
    bench.open("s")
    bench.run([1, 2], session="s")
    bench.run([1, 2, 3, 4], session="s")
    bench.receive(Suspend(1, "s"))
    exported(bench)
    for tokens, place in (([1, 2, 3, 4, 5], ("host", 4)), ([1, 2, 3], ("slot", 2)), ([7], ("tokens", 0))):
        bench.receive(Name("fork", "", pack(tokens), ticket=7))
        assert bench.of(Kept)[-1] == Kept("fork", *place, ticket=7)
    bench.run([1, 2, 3, 4])
    bench.receive(Name("fork", "", pack([1, 2, 3, 4])))
    assert bench.of(Kept)[-1] == Kept("fork", "slot", 4), "of two the nearer"
    bench.receive(Name("fork", "other key", pack([1, 2, 3, 4])))
    assert bench.of(Kept)[-1] == Kept("fork", "tokens", 0)


def test_a_name_on_a_copy_that_is_being_made_is_answered_at_once() -> None:
    bench = Bench(slots=2, limits=HOST)
    bench.open("s")
    bench.run([1, 2], session="s")
    bench.receive(Suspend(1, "s"))
    assert bench.of(Export) and not bench.of(Suspended)
    bench.receive(Name("fork", "", pack([1, 2]), ticket=7))
    assert bench.of(Kept)[-1] == Kept("fork", "host", 2, ticket=7)
    exported(bench)
    assert bench.of(Suspended) == [Suspended(1, "host", 2)]
    bench.ledger.close()


def test_a_copy_that_is_named_again_while_it_is_in_use_stays() -> None:
    bench = Bench(slots=2, limits=HOST)
    bench.open("s")
    bench.run([1, 2], session="s")
    bench.receive(Suspend(1, "s"))
    exported(bench)
    granted = bench.granted(bench.ask([1, 2, 3]))
    assert granted.hit.origin == "host"
    bench.receive(Unname("s"))
    bench.receive(Name("fork", "", pack([1, 2])))
    bench.receive(Copied(granted.grant))
    assert bench.of(Kept)[-1] == Kept("fork", "host", 2) and not bench.of(Drop)
    bench.ledger.close()
