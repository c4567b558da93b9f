"""The cache without the other actors: what it grants and evicts, what it counts, and what it reports at the end."""

from collections.abc import Iterator

import pytest

from baton.actors.lease import Place
from baton.actors.messages import (
    Cancel,
    Closed,
    Copied,
    Donate,
    Drain,
    Drained,
    Export,
    Exported,
    Extend,
    Extended,
    Flush,
    Flushed,
    Free,
    Granted,
    GrantPages,
    Refused,
    Return,
    Spare,
    Unname,
)
from baton.actors.requests import Hit
from baton.actors.tokens import pack
from tests.actors.cache.bench import HOST, Bench, take


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.ledger.close()


# Granting


def test_what_a_grant_says_of_its_match(bench: Bench) -> None:
    fresh = bench.run([1, 2, 3, 4])
    assert fresh.hit == Hit(0, 0, "", "tokens")
    assert (fresh.loan, fresh.moved, fresh.branch, fresh.pages, fresh.page_copy) == (None, False, None, [], None)
    again = bench.granted(bench.ask([1, 2, 3, 4, 5, 6]))
    assert again.hit == Hit(4, 4, "", "tree")
    assert again.loan is not None and again.loan.slot != again.state.slot and again.branch is None
    other = bench.granted(bench.ask([1, 2, 7, 8]))
    assert other.hit == Hit(0, 2, "misaligned", "tokens")
    assert other.branch == 2
    assert bench.granted(bench.ask([1, 2])).branch is None, "it lies beyond all that may be matched"
    assert bench.granted(bench.ask([1, 2, 7, 8], limit=0)).branch is None
    assert bench.granted(bench.ask([1, 2, 7, 8], limit=1)).branch is None
    assert bench.counted == {
        "prefix_cache_queries": 4 + 6 + 4 + 2 + 4 + 4,
        "prefix_cache_hits": 4,
        "granted_from:tokens": 5,
        "granted_from:tree": 1,
        "states_used:new": 1,
    }


def test_a_branch_is_worth_a_checkpoint_where_it_may_be_matched(bench: Bench) -> None:
    bench.run([1, 2, 3, 4])
    assert bench.granted(bench.ask([1, 2, 7], limit=2)).branch == 2
    assert bench.granted(bench.ask([1, 2, 3, 4, 5])).branch is None, "there is a state already"


def test_a_request_that_the_whole_pool_cannot_hold_is_refused() -> None:
    bench = Bench(pages=2)
    bench.ask(list(range(8)))
    [refused] = bench.of(Refused)
    assert (refused.grant, refused.reason) == (1, "too_large")
    assert refused.message == "8 tokens do not fit: the KV pages hold 7 tokens and one to generate"
    bench.ask(list(range(7)))
    assert len(bench.granted(2).pages) == 2 and len(bench.of(Refused)) == 1


def test_a_grant_has_pages_for_its_prompt_and_one_token_and_a_page_is_reserved_for_each_open_grant() -> None:
    bench = Bench(pages=5)
    assert len(bench.granted(bench.ask([1, 2, 3])).pages) == 1
    assert len(bench.granted(bench.ask([5, 6, 7, 8])).pages) == 2
    assert not [m for m in bench.of(Granted) if m.grant == bench.ask([9])], "two are running, and two pages are left"
    bench.receive(Extend([1]))
    assert [fed.grant for fed in bench.of(Extended)[-1].pages] == [1]


def test_a_grant_that_resumes_inside_a_page_copies_the_page() -> None:
    bench = Bench(pages=8)
    first = bench.run([1, 2, 3, 4, 5, 6])
    inside = bench.granted(bench.ask([1, 2, 3, 4, 5, 6, 7]))
    assert inside.pages[0] == first.pages[0] and inside.pages[1] not in first.pages
    assert inside.page_copy is not None
    assert (inside.page_copy.source, inside.page_copy.target) == (first.pages[1], inside.pages[1])
    assert bench.cache.pages.grant_refs[first.pages[1]] == 1
    bench.receive(Copied(inside.grant))
    assert bench.cache.pages.grant_refs[first.pages[1]] == 0
    aligned = Bench(pages=8)
    aligned.run([1, 2, 3, 4])
    assert aligned.granted(aligned.ask([1, 2, 3, 4, 5])).page_copy is None


def test_a_request_that_waits_for_its_predecessor_holds_up_no_other(bench: Bench) -> None:
    first = bench.ask([1, 2])
    later = bench.ask([1, 2, 3], predecessor=first)
    other = bench.ask([7], predecessor=99)
    assert {m.grant for m in bench.of(Granted)} == {first, other}
    bench.receive(Donate(first, bench.granted(first).state, 2, pack([1, 2]), closes=True))
    assert bench.granted(later).hit.cached_tokens == 2 and bench.of(Closed) == [Closed(first)]


def test_a_cancelled_acquire_is_forgotten(bench: Bench) -> None:
    small = Bench(slots=1)
    small.ask([1])
    waiting = small.ask([2])
    small.receive(Cancel(waiting))
    assert [(to, m.grant, m.reason) for to, m in small.sent if isinstance(m, Refused)] == [
        ("scheduler", waiting, "cancelled")
    ]
    small.receive(Free([small.granted(1).state], closes_grant=1))
    assert len(small.of(Granted)) == 1
    bench.receive(Cancel(7))
    assert not bench.sent, "Granted is under way"


# Slots


def test_the_least_recently_used_state_is_evicted_and_never_a_lent_one() -> None:
    bench = Bench(slots=3, policy="lru")
    for token in (1, 2, 3):
        bench.run([token])
    lent = bench.ask([1, 9])
    assert bench.states == [1, 1] and bench.counted["evicted_states"] == 1
    assert bench.granted(lent).loan is not None
    assert [m.hit.miss_reason for m in [bench.granted(bench.ask([2, 9]))]] == ["evicted"]
    assert bench.counted["evicted_states"] == 2 and bench.states == [1]
    bench.ask([5])
    assert len(bench.of(Granted)) == 5, "the one state that is left is lent"
    bench.receive(Copied(lent))
    assert len(bench.of(Granted)) == 6 and bench.states == []
    bench.ledger.close()


def test_a_state_counts_as_used_when_a_grant_resumes_from_it(bench: Bench) -> None:
    first, second = pack([1]), pack([2])
    bench.run([1])
    bench.run([2])
    granted = bench.granted(bench.ask([1, 9]))
    assert [node.tokens for node in bench.cache.tree.states] == [second, first]
    bench.receive(Copied(granted.grant))
    bench.receive(Free([granted.state], closes_grant=granted.grant))
    assert [node.tokens for node in bench.cache.tree.nodes] == [second, first]


def test_a_state_moves_to_the_grant_if_there_is_no_other_slot() -> None:
    bench = Bench(slots=1)
    bench.run([1, 2])
    granted = bench.granted(bench.ask([1, 2, 3]))
    assert (granted.moved, granted.hit.cached_tokens, granted.hit.origin, granted.loan) == (True, 2, "slot", None)
    assert bench.states == []
    bench.receive(Return(granted.grant, granted.state))
    assert bench.states == [2], "it goes back to where it was"


def test_a_returned_grant_gives_back_slot_loan_and_pages() -> None:
    bench = Bench(slots=3, pages=8)
    bench.run([1, 2, 3, 4, 5, 6])
    granted = bench.granted(bench.ask([1, 2, 3, 4, 5, 6, 7]))
    bench.receive(Return(granted.grant, granted.state))
    assert bench.of(Closed)[-1] == Closed(granted.grant) and not bench.cache.accounts
    assert bench.ledger.counts[Place.FREE] == 2 and bench.ledger.counts[Place.CACHED] == 1
    assert bench.cache.pages.free == 6 and bench.cache.pages.used == 0


def test_checkpoints_get_slots_only_while_no_grant_waits_for_one() -> None:
    bench = Bench(slots=4)
    grant = bench.ask([1])
    bench.run([2])
    [first, second], [third] = bench.spares(grant, 20, 40), bench.spares(grant, 60, 80)
    assert bench.of(Spare)[-1].denied == [80]
    assert bench.counted["checkpoints_granted"] == 3 and bench.counted["evicted_states"] == 1
    assert bench.spares(99, 20) == [], "that one is gone"
    waiting = bench.ask([3])
    bench.cache.receive(Free([first, second]))
    assert bench.ledger.counts[Place.FREE] == 2 and bench.spares(grant, 20) == []
    assert bench.granted(waiting)
    assert len(bench.spares(grant, 20)) == 1 and third.live
    bench.ledger.close()


def test_a_page_is_reserved_for_each_open_grant_when_pages_are_evicted_too() -> None:
    bench = Bench(pages=4)
    bench.run([1, 2, 3, 4, 5, 6, 7])
    running = bench.ask([8])
    assert bench.cache.pages.free == 1 and bench.cache.pages.cached == 2
    waiting = bench.ask([9] * 11)
    assert bench.states == [7], "three pages can be had, and one of them is the other's"
    bench.receive(Free([bench.granted(running).state], closes_grant=running))
    assert len(bench.granted(waiting).pages) == 3 and bench.states == [], "exactly as many as there are, but one"
    bench.ledger.close()


def test_a_session_s_state_is_not_evicted_for_a_checkpoint() -> None:
    bench = Bench(slots=2)
    bench.open("s")
    bench.run([1, 2], session="s")
    grant = bench.ask([3])
    assert bench.spares(grant, 20) == [] and bench.states == [2]
    bench.receive(Unname("s"))
    assert len(bench.spares(grant, 20)) == 1 and bench.states == []
    bench.ledger.close()


def test_no_checkpoint_takes_the_slot_of_a_grant_that_waits_for_pages_on_their_way_out() -> None:
    bench = Bench(slots=4, pages=5, limits=HOST)
    bench.open("s")
    bench.run([1] * 8, session="s")
    running = bench.ask([2])
    waiting = bench.ask([3] * 9)
    [export] = bench.of(Export)
    assert bench.spares(running, 20) == [] and bench.ledger.counts[Place.FREE] == 2
    bench.receive(Exported(export.key, export.state))
    bench.receive(Free([bench.granted(running).state], closes_grant=running))
    assert bench.granted(waiting)
    bench.ledger.close()


def test_the_tree_keeps_within_its_tokens() -> None:
    bench = Bench(max_tree_tokens=6, policy="lru")
    bench.run([1, 2, 3])
    bench.run([4, 5, 6])
    assert bench.states == [3, 3]
    bench.run([7])
    assert bench.states == [3, 1] and bench.cache.tree.tokens == 4


def test_no_page_is_evicted_from_a_path_that_is_used() -> None:
    bench = Bench(pages=6)
    bench.run([1, 2, 3, 4, 5])
    bench.run([6, 7, 8, 9])
    assert bench.cache.pages.cached == 3
    grant = bench.ask([1, 2, 3, 4, 5, 0])
    assert bench.granted(grant).hit.cached_tokens == 5
    bench.receive(Copied(grant))
    bench.receive(Extend([grant, grant]))
    bench.receive(Extend([grant]))
    bench.receive(Extend([grant]))
    pages = [page for m in bench.of(Extended) for g in m.pages for page in g.pages]
    assert len(pages) == 3 and bench.counted["evicted_pages"] == 1 and bench.states == [5]
    assert bench.of(Extended)[-1] == Extended([GrantPages(grant, pages[-1:])], [])


def test_rows_that_wait_for_a_page_are_reported_and_served_before_new_requests() -> None:
    bench = Bench(pages=4)
    rows = [bench.ask([token, token, token]) for token in (1, 2)]
    for row in rows:
        bench.receive(Extend([row]))
    bench.receive(Extend(rows))
    assert bench.of(Extended)[-1] == Extended([], rows)
    new = bench.ask([9])
    bench.receive(Extend([7]))
    assert bench.of(Extended)[-1] == Extended([], rows), "a closed grant is not named"
    bench.receive(Free([bench.granted(rows[1]).state], closes_grant=rows[1]))
    last = bench.of(Extended)[-1]
    assert [fed.grant for fed in last.pages] == [rows[0]] and last.starved == []
    assert not [m for m in bench.of(Granted) if m.grant == new], "one page is left, and one is kept back for the row"
    assert bench.of(Closed) == [Closed(rows[1])]


def test_starved_rows_are_not_reported_while_a_state_is_copied_out() -> None:
    """The state's pages become free after the copy, so retracting a row now may be unnecessary."""
    bench = Bench(pages=5)
    rows = [bench.ask([token, token, token]) for token in (1, 2)]
    held = bench.cache.pages.take(1)
    for row in rows:
        bench.receive(Extend([row]))
    bench.receive(Extend(rows))
    assert bench.of(Extended)[-1] == Extended([], rows)
    bench.cache.tiers.exports[9] = []
    bench.cache.pages.drop_grant_refs(held)
    bench.cache.act()
    assert bench.of(Extended)[-1] == Extended([GrantPages(rows[0], held)], [])
    reports = len(bench.of(Extended))
    bench.cache.act()
    del bench.cache.tiers.exports[9]
    bench.cache.act()
    assert bench.of(Extended)[-1] == Extended([], rows[1:])
    bench.cache.act()
    assert len(bench.of(Extended)) == reports + 2
    bench.ledger.close()


# Giving back


def test_a_state_whose_position_contradicts_its_tokens_is_quarantined(bench: Bench) -> None:
    granted = bench.granted(bench.ask([1, 2, 3]))
    bench.receive(Donate(granted.grant, granted.state, 3, pack([1, 2]), closes=True))
    assert bench.ledger.violations == 1 and bench.ledger.counts[Place.QUARANTINED] == 1
    assert not bench.states and bench.of(Closed) == [Closed(granted.grant)] and not granted.state.live


def test_a_second_state_for_one_path_is_freed(bench: Bench) -> None:
    grants = [bench.granted(bench.ask([1, 2])) for _ in range(2)]
    for granted in grants:
        bench.receive(Donate(granted.grant, granted.state, 2, pack([1, 2]), closes=False))
    assert bench.states == [2] and bench.ledger.counts[Place.FREE] == 7
    bench.receive(Donate(1, take(bench), 0, b"", closes=False))
    assert bench.ledger.violations == 1
    assert not bench.of(Closed)
    bench.ledger.close()


def test_a_flush_forgets_all_paths_and_states_under_way_are_freed(bench: Bench) -> None:
    bench.run([1, 2])
    lent = bench.granted(bench.ask([1, 2, 3]))
    bench.run([8, 9])
    bench.receive(Flush(5))
    assert bench.of(Flushed) == [Flushed(5)] and bench.counted["flushes"] == 1
    assert bench.states == [] and bench.ledger.counts[Place.CACHED] == 1, "one is lent"
    assert len(list(bench.cache.leases())) == 1
    bench.receive(Copied(lent.grant))
    assert bench.ledger.counts[Place.CACHED] == 0 and not list(bench.cache.leases())
    bench.receive(Donate(lent.grant, lent.state, 3, pack([3]), closes=True))
    assert bench.states == [] and bench.ledger.counts[Place.FREE] == 8
    assert bench.granted(bench.ask([1, 2, 3])).hit.matched_tokens == 0


# The end


def test_a_drain_ends_when_everything_is_home_and_names_what_is_not() -> None:
    bench = Bench(slots=4, pages=4, limits=HOST)
    bench.open("s")
    bench.run([1, 2], session="s")
    held = bench.granted(bench.ask([5, 6]))
    bench.receive(Drain())
    assert not bench.of(Drained)
    bench.receive(Free([held.state], closes_grant=held.grant))
    assert bench.of(Drained) == [Drained([])] and not bench.of(Export), "there is no disk to be suspended to"
    bench.receive(Flush(1))
    assert len(bench.of(Drained)) == 1
    leaky = Bench(slots=2, pages=4)
    lease = take(leaky)
    leaky.cache.pages.take(1)
    leaky.receive(Drain())
    [drained] = leaky.of(Drained)
    assert drained.leaks == [f"slot {lease.slot}: owned by cache", "page 0: held by a grant"]
    leaky.ledger.close()
