"""The kind of each state while conversations continue, branch, share a beginning and are resumed."""

from collections import Counter

import pytest

from baton.actors.cache.radix import Node
from baton.actors.kinds import Kind
from baton.actors.lease import Lease
from baton.actors.messages import Copied, Donate, Granted, Name
from baton.actors.tokens import pack
from tests.actors.cache.bench import Bench


@pytest.fixture
def bench() -> Bench:
    return Bench(slots=32)


def node(bench: Bench, tokens: list[int]) -> Node[Lease]:
    """Return the node at the end of these tokens."""
    found = bench.cache.tree.deepest("", pack(tokens), len(tokens))
    assert found is not None and found.end == len(tokens), f"there is no state behind {len(tokens)} tokens"
    return found


def kinds(bench: Bench, *ends: list[int]) -> list[Kind]:
    return [node(bench, tokens).kind for tokens in ends]


def told(bench: Bench, what: str) -> dict[str, int]:
    """Return the counters of states by kind. what: "used", "evicted" or "regretted" (missed soon after eviction)."""
    return {name.partition(":")[2]: n for name, n in bench.counted.items() if name.startswith(f"states_{what}:")}


ONE, TWO, THREE, FOUR = [1] * 20, [1] * 40, [1] * 60, [1] * 80


def test_a_conversation_s_deepest_state_is_its_frontier(bench: Bench) -> None:
    bench.run(ONE)
    assert kinds(bench, ONE) == [Kind.NEW]
    bench.run(TWO)
    assert kinds(bench, ONE, TWO) == [Kind.LAST_END, Kind.FRONTIER]
    bench.run(THREE)
    assert kinds(bench, ONE, TWO, THREE) == [Kind.INTERIOR, Kind.LAST_END, Kind.FRONTIER]
    assert told(bench, "used") == {"new": 1, "frontier": 1}


def test_a_checkpoint_has_the_kind_that_it_was_taken_for(bench: Bench) -> None:
    grant = bench.ask(THREE)
    slots = [bench.spares(grant, 20, kind=Kind.BRANCH), bench.spares(grant, 40, kind=Kind.PROMPT_END)]
    for [slot], end in zip(slots, (20, 40), strict=True):
        bench.receive(Donate(grant, slot, end, pack([1] * 20), closes=False))
    assert kinds(bench, ONE, TWO) == [Kind.BRANCH, Kind.PROMPT_END]
    bench.ledger.close()


def test_the_same_prompt_again_makes_its_state_a_last_end(bench: Bench) -> None:
    grant = bench.ask(TWO)
    [slot] = bench.spares(grant, 39, kind=Kind.PROMPT_END)
    bench.receive(Donate(grant, slot, 39, pack([1] * 39), closes=False))
    for ways in range(1, 5):
        again = bench.ask(TWO)
        assert bench.granted(again).hit.cached_tokens == 39
        assert kinds(bench, [1] * 39) == [Kind.HUB if ways == 4 else Kind.LAST_END]
        bench.receive(Copied(again))
    bench.ledger.close()


def test_the_end_of_an_answer_that_was_regenerated_is_left(bench: Bench) -> None:
    first, second = [*ONE, *[2] * 10], [*ONE, *[3] * 10]
    bench.run(ONE)
    for answer in (first, second):
        bench.run(answer)
    assert kinds(bench, first, second) == [Kind.LEFT, Kind.FRONTIER]
    bench.run([*first, *[4] * 10])
    assert kinds(bench, first) == [Kind.LAST_END] and kinds(bench, second) == [Kind.LEFT], "it is the other way round"


def test_conversations_that_only_begin_alike_do_not_leave_each_other(bench: Bench) -> None:
    first, second = [*ONE, *[2] * 10], [*ONE, *[3] * 10]
    bench.run(first)
    bench.run(second)
    assert kinds(bench, first, second) == [Kind.NEW, Kind.NEW]


def test_a_session_s_state_is_named_as_long_as_the_name_is_on_it(bench: Bench) -> None:
    bench.open("s")
    bench.run(ONE, session="s")
    assert kinds(bench, ONE) == [Kind.NAMED]
    bench.run(TWO, session="s")
    assert kinds(bench, ONE, TWO) == [Kind.LAST_END, Kind.NAMED]
    bench.run(THREE, session="s")
    bench.receive(Name("fork", "", pack(TWO)))
    assert kinds(bench, ONE, TWO, THREE) == [Kind.INTERIOR, Kind.NAMED, Kind.NAMED]


def test_when_a_frontier_is_evicted_the_state_above_takes_its_place() -> None:
    bench = Bench(slots=3)
    bench.run(ONE)
    bench.run([*ONE, 1])
    bench.run([7] * 400)
    assert kinds(bench, ONE, [*ONE, 1]) == [Kind.LAST_END, Kind.FRONTIER]
    bench.ask([8] * 9)
    assert bench.states == [20, 400] or bench.states == [400, 20], "one token was not worth a slot"
    assert kinds(bench, ONE) == [Kind.FRONTIER] and told(bench, "evicted") == {"frontier": 1}
    bench.ledger.close()


def test_a_state_that_is_missed_soon_after_its_eviction_is_regretted() -> None:
    bench = Bench(slots=2)
    bench.run(ONE)
    bench.run([7] * 400)
    bench.run([8] * 300)
    assert bench.states == [400, 300]
    again = bench.granted(bench.ask([*ONE, 5]))
    assert (again.hit.cached_tokens, again.hit.miss_reason) == (0, "evicted") and told(bench, "regretted") == {"new": 1}
    bench.ledger.close()


def test_a_frontier_moves_if_keeping_it_is_worth_less_than_another_state() -> None:
    bench = Bench(slots=2)
    bench.run([7] * 200)
    bench.run(ONE)
    granted = bench.granted(bench.ask(TWO))
    assert granted.moved and granted.hit.cached_tokens == 20 and bench.states == [200]
    bench.receive(Donate(granted.grant, granted.state, 40, pack([1] * 20), closes=True))
    assert kinds(bench, TWO) == [Kind.FRONTIER], "the earlier turns are known"
    copied = Bench(slots=2, policy="lru")
    copied.run([7] * 200)
    copied.run(ONE)
    granted = copied.granted(copied.ask(TWO))
    assert not granted.moved and copied.states == [20]
    copied.ledger.close()


def test_a_scan_does_not_evict_conversations() -> None:
    """States of prompts seen only once are evicted before conversations, however many such prompts arrive."""
    bench = Bench(slots=8)
    chats = [[token] * 30 for token in range(1, 5)]
    for length in (10, 20, 30):
        for chat in chats:
            bench.run(chat[:length])
    for token in range(100, 140):
        bench.run([token] * 30)
    assert Counter(bench.states)[30] >= 8 and [node(bench, chat).end for chat in chats] == [30] * 4


def test_a_moved_state_returns_to_its_node_when_the_grant_is_returned() -> None:
    bench = Bench(slots=1)
    bench.run(ONE)
    granted: Granted = bench.granted(bench.ask(TWO))
    assert granted.moved
    bench.cache._undo(bench.cache.accounts[granted.grant], granted.state)
    assert kinds(bench, ONE) == [Kind.NEW]
