"""The core of the cache only: an LRU policy or no eviction, and no tiers below the pool."""

import asyncio

import pytest

from baton.actors.lease import Place
from baton.actors.messages import (
    Cancel,
    Copied,
    Donate,
    Drain,
    Drained,
    Flush,
    Flushed,
    Granted,
    Kept,
    Name,
    Refused,
    Return,
    Speeds,
    Suspend,
    Suspended,
    Unmade,
    Unname,
)
from baton.actors.tokens import pack
from baton.models.hash import HashModel
from baton.models.hash_definition import expected_output
from tests.actors.cache.bench import PAGE, Bench
from tests.actors.cache.plain import cache_without_eviction, lru_cache
from tests.actors.ring import Ring, running

VOCABULARY = 1000
PLAIN = {"lru": lru_cache, "none": cache_without_eviction}


def model(page_fold: bool = True) -> HashModel:
    return HashModel(VOCABULARY, 16, 4096, page_fold)


def answer_to(prompt: list[int], page_fold: bool = True) -> list[int]:
    return expected_output(prompt, 4, VOCABULARY, page_fold=page_fold)


def test_a_ring_with_lru_reuses_states_and_evicts_the_least_recently_used() -> None:
    async def scenario() -> None:
        async with running(model(), slots=4, cache=lru_cache, max_running=1) as ring:
            first, second, third = ([start] * 20 for start in (1, 2, 3))
            histories = {}
            for prompt in (first, second, third):
                histories[prompt[0]] = prompt + await ask(ring, prompt)
            # Each request kept the state at its end. The next request finds no free slot and evicts the oldest state.
            again = histories[3] + [9]
            assert await ask(ring, again) == answer_to(again)
            assert ring.relay.counters()["granted_from:tree"] + ring.relay.counters().get("granted_from:slot", 0) == 1
            for start in range(10, 20):
                await ask(ring, [start] * 20)
            assert ring.relay.counters()["evicted_states"] >= 10
            late = histories[1] + [9]
            answer = await ring.ask(late, 4)
            assert answer.tokens == answer_to(late)
            assert (answer.origin, answer.cached) == ("tokens", 0), "its state was the least recently used"
            worth = [line["worth"] for line in ring.relay.debug_tree() if line["slot"] is not None]
            assert len(worth) == len(set(worth)) > 1

    asyncio.run(scenario())


async def ask(ring: Ring, prompt: list[int]) -> list[int]:
    answer = await ring.ask(prompt, 4)
    assert answer.tokens == answer_to(prompt)
    return answer.tokens


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("page_fold", [True, False], ids=["pages", "no pages"])
def test_more_requests_than_slots_are_answered_and_nothing_leaks(name: str, page_fold: bool) -> None:
    async def scenario() -> None:
        async with running(model(page_fold), slots=3, pages=12, cache=PLAIN[name], max_running=3) as ring:
            shared = list(range(30))
            prompts = [shared[: 5 * (each % 5)] + [100 + each] * 8 for each in range(20)]
            answers = [ring.submit(prompt, 4) for prompt in prompts]
            for answer in answers:
                await asyncio.wait_for(answer.done.wait(), 60)
                assert answer.tokens == answer_to(answer.prompt, page_fold)
            if name == "none":
                assert not ring.relay.unit.cache.tree.states and "evicted_states" not in ring.relay.counters()
            assert ring.relay.gauges()["stored"] == {"host": 0, "disk": 0, "host_bytes": 0, "disk_bytes": 0}
            assert ring.relay.gauges()["state_chance"] == {}
            await ring.flush()
            assert not ring.relay.unit.cache.tree.nodes

    asyncio.run(scenario())


@pytest.mark.parametrize("name", PLAIN)
def test_sessions_work_without_tiers(name: str) -> None:
    """Without tiers a name does not protect its state: a session resumes from what the tree has, or from its tokens."""

    async def scenario() -> None:
        async with running(model(), slots=2, cache=PLAIN[name], max_running=1) as ring:
            history = [1, 2, 3]
            for turn in range(4):
                answer = await ring.turn("s", history, 4)
                assert answer.tokens == answer_to(history)
                assert (answer.origin == "tokens") == (name == "none" or turn == 0)
                history = history + answer.tokens + [turn]
            assert (await ring.suspend("s")).tier == "tokens"
            ring.unname("s")

    asyncio.run(scenario())


def test_without_eviction_an_acquire_that_finds_no_slot_waits() -> None:
    bench = Bench(2, make=cache_without_eviction)
    first, second, third, fourth = (bench.ask([each] * 3) for each in range(4))
    assert [granted.grant for granted in bench.of(Granted)] == [first, second]
    bench.receive(Cancel(third))
    assert [refused.reason for refused in bench.of(Refused)] == ["cancelled"]
    bench.receive(Donate(first, bench.granted(first).state, 3, pack([0] * 3), closes=True))
    assert bench.of(Granted)[-1].grant == fourth, "the donated state was not kept, and its slot was free"
    assert bench.states == []
    for grant in (second, fourth):
        bench.receive(Return(grant, bench.granted(grant).state))
    assert bench.ledger.counts[Place.FREE] == 2


def test_without_eviction_leaves_without_states_still_give_up_their_pages() -> None:
    bench = Bench(2, 4, make=cache_without_eviction)
    for each in range(3):
        granted = bench.run([each] * (3 * PAGE))
        assert granted.hit.cached_tokens == 0
    assert bench.counted["evicted_pages"] == 6
    bench.ask([7] * (5 * PAGE))
    assert [refused.reason for refused in bench.of(Refused)] == ["too_large"]


def test_lru_takes_the_slot_of_the_oldest_state_that_is_not_lent() -> None:
    bench = Bench(3, make=lru_cache)
    for each in range(3):
        bench.run([each] * (3 + each))
    assert bench.states == [3, 4, 5]
    lent = bench.ask([0] * 3 + [9])
    assert bench.granted(lent).loan is not None and bench.states == [5, 3], "the oldest that is not used itself"
    bench.ask([8])
    assert bench.states == [3], "a lent state stays"
    bench.ask([9])
    assert len(bench.of(Granted)) == 5, "with all slots in use the last Acquire waits"
    bench.receive(Copied(lent))
    assert len(bench.of(Granted)) == 6 and bench.states == []


def test_commands_about_names_are_answered_and_a_report_of_a_tier_is_an_error() -> None:
    bench = Bench(2, make=lru_cache)
    for message in (Name("s", "", b""), Suspend(7, "s"), Unname("s"), Speeds(1.0, 1.0), Flush(5), Drain()):
        bench.receive(message)
    assert [message for _, message in bench.sent] == [
        Kept("s", "tokens", 0),
        Suspended(7, "tokens", 0),
        Flushed(5),
        Drained([]),
    ]
    with pytest.raises(TypeError, match="there are no tiers"):
        bench.receive(Unmade(1, "there is no copy"))


def test_a_moved_state_that_was_not_used_returns_to_its_node() -> None:
    bench = Bench(1, make=lru_cache)
    bench.run([1, 2, 3])
    grant = bench.ask([1, 2, 3, 4])
    granted = bench.granted(grant)
    assert granted.moved and bench.states == []
    bench.receive(Return(grant, granted.state))
    assert bench.states == [3]
