"""The cache alone: what it grants of what it keeps, what goes for it, what it counts, and what it says at the end."""

from collections.abc import Iterator
from typing import Any

import pytest

from actors.cache.actor import Cache
from actors.cache.copies import NO_TIERS, TierLimits
from actors.cache.pages import PagePool
from actors.lease import Lease, Ledger, Place
from actors.messages import (
    Acquire,
    Cancel,
    Closed,
    Copied,
    Donate,
    Drain,
    Drained,
    Drop,
    Export,
    Exported,
    Extend,
    Extended,
    Flush,
    Flushed,
    Free,
    Granted,
    GrantPages,
    Kept,
    Message,
    Name,
    Refused,
    Return,
    SaveFromReq,
    Spare,
    Suspend,
    Suspended,
    Unname,
    Want,
)
from actors.tokens import pack

PAGE = 4
HOST = TierLimits(1000, 0, 100)


class Bench:
    """A cache, and what it has sent."""

    def __init__(self, slots: int = 8, pages: int = 0, limits: TierLimits = NO_TIERS, **more: Any) -> None:
        self.sent: list[tuple[str, Message]] = []
        self.ledger = Ledger(slots)
        pool = PagePool(pages, PAGE)
        self.cache = Cache(lambda to, m: self.sent.append((to, m)), self.ledger, pool, limits=limits, **more)
        self._grants = 0

    def receive(self, message: Message) -> None:
        self.cache.receive(message)
        self.cache.act()

    def ask(self, tokens: list[int], limit: int | None = None, **more: Any) -> int:
        self._grants += 1
        given = {"salt": "", "predecessor": None} | more
        at_most = len(tokens) - 1 if limit is None else limit
        self.receive(Acquire(self._grants, pack(tokens), at_most, **given))
        return self._grants

    def granted(self, grant: int) -> Granted:
        [granted] = [m for m in self.of(Granted) if m.grant == grant]
        return granted

    def run(self, tokens: list[int], session: str = "", **more: Any) -> Granted:
        """A request that ends at the end of these tokens, and leaves its state there."""
        grant = self.ask(tokens, session=session, **more)
        granted = self.granted(grant)
        self.receive(Copied(grant))
        rest = pack(tokens[granted.match :])
        if session:
            self.receive(SaveFromReq(grant, session, granted.state, len(tokens), rest))
        else:
            self.receive(Donate(grant, granted.state, len(tokens), rest, closes=True))
        return granted

    def open(self, session: str) -> None:
        self.receive(Name(session, "", b""))

    def of(self, kind: type) -> list:
        return [message for _, message in self.sent if isinstance(message, kind)]

    @property
    def counted(self) -> dict[str, int]:
        return +(self.cache.counters + self.cache.tiers.counters)

    @property
    def states(self) -> list[int]:
        """The ends of the nodes that keep a state, the least recently used first."""
        return [node.end for node in self.cache.tree.states]


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.ledger.close()


# Granting


def test_what_a_grant_says_of_its_match(bench: Bench) -> None:
    fresh = bench.run([1, 2, 3, 4])
    assert (fresh.match, fresh.matched_tokens, fresh.miss_reason, fresh.origin) == (0, 0, "", "tokens")
    assert (fresh.loan, fresh.moved, fresh.branch, fresh.pages, fresh.page_copy) == (None, False, None, [], None)
    again = bench.granted(bench.ask([1, 2, 3, 4, 5, 6]))
    assert (again.match, again.matched_tokens, again.miss_reason, again.origin) == (4, 4, "", "tree")
    assert again.loan is not None and again.loan.slot != again.state.slot and again.branch is None
    other = bench.granted(bench.ask([1, 2, 7, 8]))
    assert (other.match, other.matched_tokens, other.miss_reason, other.origin) == (0, 2, "misaligned", "tokens")
    assert other.branch == 2
    assert bench.granted(bench.ask([1, 2])).branch is None, "it lies beyond all that may be matched"
    assert bench.granted(bench.ask([1, 2, 7, 8], limit=0)).branch is None
    assert bench.granted(bench.ask([1, 2, 7, 8], limit=1)).branch is None
    assert bench.counted == {"prefix_cache_queries": 4 + 6 + 4 + 2 + 4 + 4, "prefix_cache_hits": 4}


def test_a_branch_is_worth_a_checkpoint_where_it_may_be_matched(bench: Bench) -> None:
    bench.run([1, 2, 3, 4])
    assert bench.granted(bench.ask([1, 2, 7], limit=2)).branch == 2
    assert bench.granted(bench.ask([1, 2, 3, 4, 5])).branch is None, "there is a state already"


def test_what_does_not_fit_into_the_whole_pool_is_refused() -> None:
    bench = Bench(pages=2)
    bench.ask(list(range(8)))
    [refused] = bench.of(Refused)
    assert (refused.grant, refused.reason) == (1, "too_large")
    assert refused.message == "8 tokens do not fit: the KV pages hold 7 tokens and one to generate"
    bench.ask(list(range(7)))
    assert len(bench.granted(2).pages) == 2 and len(bench.of(Refused)) == 1


def test_pages_reach_to_the_prompt_and_one_token_and_some_are_kept_back() -> None:
    bench = Bench(pages=5)
    assert len(bench.granted(bench.ask([1, 2, 3])).pages) == 1
    assert len(bench.granted(bench.ask([5, 6, 7, 8])).pages) == 2
    assert not [m for m in bench.of(Granted) if m.grant == bench.ask([9])], "two are running, and two pages are left"
    bench.receive(Extend([1]))
    assert [given.grant for given in bench.of(Extended)[-1].pages] == [1]


def test_whoever_resumes_inside_a_page_copies_it() -> None:
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


def test_a_request_waits_for_its_predecessor_and_keeps_nobody_waiting(bench: Bench) -> None:
    first = bench.ask([1, 2])
    later = bench.ask([1, 2, 3], predecessor=first)
    other = bench.ask([7], predecessor=99)
    assert {m.grant for m in bench.of(Granted)} == {first, other}
    bench.receive(Donate(first, bench.granted(first).state, 2, pack([1, 2]), closes=True))
    assert bench.granted(later).match == 2 and bench.of(Closed) == [Closed(first)]


def test_one_that_is_cancelled_is_forgotten(bench: Bench) -> None:
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


def test_the_least_recently_used_state_goes_and_none_that_is_lent() -> None:
    bench = Bench(slots=3)
    for token in (1, 2, 3):
        bench.run([token])
    lent = bench.ask([1, 9])
    assert bench.states == [1, 1] and bench.counted["evicted_states"] == 1
    assert bench.granted(lent).loan is not None
    assert [m.miss_reason for m in [bench.granted(bench.ask([2, 9]))]] == ["evicted"]
    assert bench.counted["evicted_states"] == 2 and bench.states == [1]
    bench.ask([5])
    assert len(bench.of(Granted)) == 5, "the one state that is left is lent"
    bench.receive(Copied(lent))
    assert len(bench.of(Granted)) == 6 and bench.states == []
    bench.ledger.close()


def test_the_state_itself_moves_where_there_is_no_other_slot() -> None:
    bench = Bench(slots=1)
    bench.run([1, 2])
    granted = bench.granted(bench.ask([1, 2, 3]))
    assert (granted.moved, granted.match, granted.origin, granted.loan) == (True, 2, "slot", None)
    assert bench.states == []
    bench.receive(Return(granted.grant, granted.state))
    assert bench.states == [2], "it goes back to where it was"


def test_an_admission_undone_gives_back_slot_loan_and_pages() -> None:
    bench = Bench(slots=3, pages=8)
    bench.run([1, 2, 3, 4, 5, 6])
    granted = bench.granted(bench.ask([1, 2, 3, 4, 5, 6, 7]))
    bench.receive(Return(granted.grant, granted.state))
    assert bench.of(Closed)[-1] == Closed(granted.grant) and not bench.cache.accounts
    assert bench.ledger.counts[Place.FREE] == 2 and bench.ledger.counts[Place.CACHED] == 1
    assert bench.cache.pages.free == 6 and bench.cache.pages.used == 0


def test_checkpoint_slots_are_for_those_that_run_while_no_request_waits_for_one() -> None:
    bench = Bench(slots=4)
    grant = bench.ask([1])
    bench.run([2])
    bench.receive(Want(grant, 2))
    bench.receive(Want(grant, 2))
    assert [(m.grant, m.asked, len(m.leases)) for m in bench.of(Spare)] == [(grant, 2, 2), (grant, 2, 1)]
    assert bench.counted["checkpoints_granted"] == 3 and bench.counted["evicted_states"] == 1
    bench.receive(Want(99, 1))
    assert bench.of(Spare)[-1].leases == [], "that one is gone"
    [first, second], [third] = (spare.leases for spare in bench.of(Spare)[:2])
    waiting = bench.ask([3])
    bench.cache.receive(Free([first, second]))
    bench.cache.receive(Want(grant, 1))
    assert bench.of(Spare)[-1].leases == [] and bench.ledger.counts[Place.FREE] == 2
    bench.cache.act()
    assert bench.granted(waiting)
    bench.receive(Want(grant, 1))
    assert len(bench.of(Spare)[-1].leases) == 1 and third.live
    bench.ledger.close()


def test_the_tree_keeps_within_its_tokens() -> None:
    bench = Bench(max_tree_tokens=6)
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
    assert bench.granted(grant).match == 5
    bench.receive(Copied(grant))
    bench.receive(Extend([grant, grant]))
    bench.receive(Extend([grant]))
    bench.receive(Extend([grant]))
    given = [page for m in bench.of(Extended) for g in m.pages for page in g.pages]
    assert len(given) == 3 and bench.counted["evicted_pages"] == 1 and bench.states == [5]
    assert bench.of(Extended)[-1] == Extended([GrantPages(grant, given[-1:])], [])


def test_rows_that_wait_for_a_page_are_told_of_and_come_before_new_ones() -> None:
    bench = Bench(pages=4)
    rows = [bench.ask([token, token, token]) for token in (1, 2)]
    for row in rows:
        bench.receive(Extend([row]))
    bench.receive(Extend(rows))
    assert bench.of(Extended)[-1] == Extended([], rows)
    new = bench.ask([9])
    bench.receive(Extend([7]))
    assert bench.of(Extended)[-1] == Extended([], rows), "of one that is closed nothing is said"
    bench.receive(Free([bench.granted(rows[1]).state], closes_grant=rows[1]))
    last = bench.of(Extended)[-1]
    assert [given.grant for given in last.pages] == [rows[0]] and last.starved == []
    assert not [m for m in bench.of(Granted) if m.grant == new], "one page is left, and one is kept back for the row"
    assert bench.of(Closed) == [Closed(rows[1])]


def test_word_of_rows_that_wait_is_taken_back_while_a_state_leaves_and_given_again() -> None:
    """Pages come with it, and then nobody may have to be retracted."""
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
    told = len(bench.of(Extended))
    bench.cache.act()
    del bench.cache.tiers.exports[9]
    bench.cache.act()
    assert bench.of(Extended)[-1] == Extended([], rows[1:])
    bench.cache.act()
    assert len(bench.of(Extended)) == told + 2
    bench.ledger.close()


# Giving back


def test_a_state_that_does_not_fit_its_tokens_is_put_out_of_use(bench: Bench) -> None:
    granted = bench.granted(bench.ask([1, 2, 3]))
    bench.receive(Donate(granted.grant, granted.state, 3, pack([1, 2]), closes=True))
    assert bench.ledger.violations == 1 and bench.ledger.counts[Place.QUARANTINED] == 1
    assert not bench.states and bench.of(Closed) == [Closed(granted.grant)] and not granted.state.live


def test_a_second_state_for_one_path_is_freed(bench: Bench) -> None:
    grants = [bench.granted(bench.ask([1, 2])) for _ in range(2)]
    for granted in grants:
        bench.receive(Donate(granted.grant, granted.state, 2, pack([1, 2]), closes=False))
    assert bench.states == [2] and bench.ledger.counts[Place.FREE] == 7
    bench.receive(Donate(1, _lease(bench), 0, b"", closes=False))
    assert bench.ledger.violations == 1
    assert not bench.of(Closed)
    bench.ledger.close()


def test_after_a_flush_nothing_is_known_and_what_was_under_way_is_freed(bench: Bench) -> None:
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
    assert bench.granted(bench.ask([1, 2, 3])).matched_tokens == 0


# Sessions


def test_a_turn_takes_the_session_s_name_along(bench: Bench) -> None:
    bench.open("s")
    assert bench.of(Kept) == [Kept("s", "tokens", 0)]
    bench.run([1, 2], session="s")
    assert bench.of(Kept)[-1] == Kept("s", "slot", 2)
    bench.run([1, 2, 3, 4], session="s")
    assert bench.of(Kept)[-1] == Kept("s", "slot", 4) and bench.states == [2, 4]
    assert [sorted(node.sessions) for node in bench.cache.tree.states] == [[], ["s"]]
    assert bench.counted["resumed_from_tree"] == 1
    bench.run([7], session="nobody opened it")
    assert bench.of(Kept)[-1].session == "s" and bench.counted["resumed_from_tree"] == 1
    bench.receive(Unname("s"))
    assert [sorted(node.sessions) for node in bench.cache.tree.states] == [[], [], []]


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


def exported(bench: Bench) -> list[Export]:
    """Carry out the exports that are under way; what they were."""
    found = bench.of(Export)
    bench.sent[:] = [(to, m) for to, m in bench.sent if not isinstance(m, Export)]
    for export in found:
        bench.receive(Exported(export.key, export.state))
    return found


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
    assert (granted.match, granted.origin, granted.loan, granted.moved) == (5, "host", None, False)
    assert granted.fill is not None and (granted.fill.key, granted.fill.first_page) == (export.key, 0)
    assert granted.page_copy is None and bench.counted["resumed_from_host"] == 1
    bench.receive(Copied(granted.grant))
    bench.receive(SaveFromReq(granted.grant, "s1", granted.state, 6, pack([9])))
    assert bench.of(Drop) == [Drop([export.key])], "the name has moved on"
    bench.ledger.close()


def test_where_the_match_s_own_pages_are_in_the_way_it_is_begun_above_them_from_the_copy() -> None:
    bench = Bench(slots=4, pages=3, limits=HOST)
    bench.open("s")
    bench.run([1, 2, 3, 4, 5])
    bench.run([1, 2, 3, 4, 5, 6, 7], session="s")
    bench.receive(Suspend(1, "s"))
    exported(bench)
    assert bench.states == [5] and bench.cache.pages.free == 1
    granted = bench.granted(bench.ask([1, 2, 3, 4, 5, 6, 7, 8, 9], session="s"))
    assert (granted.match, granted.origin, len(granted.pages)) == (7, "host", 3) and bench.states == []
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


def test_a_state_that_would_be_lost_stays_if_it_may_not() -> None:
    bench = Bench(slots=4)
    bench.open("s")
    bench.run([1, 2], session="s")
    [node] = bench.cache.tree.states
    assert not bench.cache.tiers.demote(node, may_lose=False) and bench.states == [2]
    assert bench.cache.tiers.demote(node) and bench.states == [] and node.evicted
    assert bench.of(Kept)[-1] == Kept("s", "tokens", 0)


def test_a_slot_is_kept_free_where_the_next_to_go_is_a_session_s() -> None:
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
    unnamed = Bench(slots=2, limits=HOST)
    unnamed.run([1])
    unnamed.run([2])
    assert not unnamed.of(Export) and unnamed.states == [1, 1], "that one can go at once"


def test_sessions_keep_only_so_many_slots_the_latest() -> None:
    bench = Bench(slots=8, limits=TierLimits(1000, 0, 100, session_slots=2))
    for token in (1, 2, 3):
        bench.open(f"s{token}")
        bench.run([token], session=f"s{token}")
    bench.run([4])
    assert [export.position for export in exported(bench)] == [1] and bench.of(Kept)[-1] == Kept("s1", "host", 1)
    assert len(bench.states) == 3


def test_a_fork_names_the_deepest_state_there_is() -> None:
    bench = Bench(slots=4, limits=HOST)
    bench.open("s")
    bench.run([1, 2], session="s")
    bench.run([1, 2, 3, 4], session="s")
    bench.receive(Suspend(1, "s"))
    exported(bench)
    for tokens, kept in (([1, 2, 3, 4, 5], ("host", 4)), ([1, 2, 3], ("slot", 2)), ([7], ("tokens", 0))):
        bench.receive(Name("fork", "", pack(tokens)))
        assert bench.of(Kept)[-1] == Kept("fork", *kept)
    bench.receive(Name("fork", "other key", pack([1, 2, 3, 4])))
    assert bench.of(Kept)[-1] == Kept("fork", "tokens", 0)


# The end


def test_the_lap_ends_when_everything_is_home_and_what_is_not_is_named() -> None:
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
    lease = _lease(leaky)
    leaky.cache.pages.take(1)
    leaky.receive(Drain())
    [drained] = leaky.of(Drained)
    assert drained.leaks == [f"slot {lease.slot}: owned by cache", "page 0: held by a grant"]
    leaky.ledger.close()


def _lease(bench: Bench) -> Lease:
    lease = bench.ledger.take("cache")
    assert lease is not None
    return lease
