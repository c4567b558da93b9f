"""Acquires that wait for a state that another request (the leader) computes: where, for which leader, how long."""

from typing import Any

import pytest

from baton.actors.cache.together import MAX_LEADERS
from baton.actors.messages import Cancel, Donate, Flush, Free, Granted, Mark, Passed
from baton.actors.tokens import pack
from tests.actors.cache.bench import Bench

STEM = [1] * 100


@pytest.fixture
def bench() -> Bench:
    return Bench(slots=32)


def ask(bench: Bench, end: int, **more: Any) -> int:
    return bench.ask([*STEM, *[end] * 30], **more)


def is_granted(bench: Bench, grant: int) -> bool:
    return any(granted.grant == grant for granted in bench.of(Granted))


def keep(bench: Bench, leader: int, position: int) -> None:
    """Donate a checkpoint of the grant `leader` at this position."""
    [slot] = bench.spares(leader, position)
    begin = bench.cache.accounts[leader].position
    tokens = [*STEM, *[2] * 30][begin:position]
    bench.receive(Donate(leader, slot, position, pack(tokens), closes=False))


def test_an_acquire_that_shares_much_waits_for_the_state_where_the_prompts_part(bench: Bench) -> None:
    first, second, third = ask(bench, 2), ask(bench, 3), ask(bench, 4)
    assert bench.of(Mark) == [Mark(first, 100)], "the state is asked for once"
    assert [granted.grant for granted in bench.of(Granted)] == [first]
    other = bench.ask([9] * 100)
    assert is_granted(bench, other), "they hold up no other"
    keep(bench, first, 100)
    assert [bench.granted(grant).hit.cached_tokens for grant in (second, third)] == [100, 100]
    bench.ledger.close()


def test_the_same_prompt_waits_for_the_token_before_its_end(bench: Bench) -> None:
    first, second = ask(bench, 2), ask(bench, 2)
    assert bench.of(Mark) == [Mark(first, 129)]
    keep(bench, first, 129)
    assert bench.granted(second).hit.cached_tokens == 129
    bench.ledger.close()


@pytest.mark.parametrize(
    "more",
    [{"salt": "tenant"}, {"priority": -1}, {"limit": 64}],
    ids=["of another tenant", "more urgent", "may not use it"],
)
def test_an_acquire_does_not_wait(bench: Bench, more: Any) -> None:
    ask(bench, 2)
    assert is_granted(bench, ask(bench, 2, **more)) and not bench.of(Mark)
    bench.ledger.close()


def test_a_short_shared_prefix_is_computed_twice(bench: Bench) -> None:
    bench.ask([*[1] * 64, 2, 3])
    assert is_granted(bench, bench.ask([*[1] * 64, 4, 5]))
    bench.ask([*[8] * 65, 2, 3])
    assert not is_granted(bench, bench.ask([*[8] * 65, 4, 5]))
    bench.ledger.close()


def test_an_acquire_does_not_wait_for_a_grant_that_begins_before_its_own_match(bench: Bench) -> None:
    slow = ask(bench, 2)
    quick = ask(bench, 3, priority=-1)
    bench.receive(Donate(quick, bench.granted(quick).state, 90, pack([1] * 90), closes=True))
    assert bench.granted(ask(bench, 2)).hit.cached_tokens == 90, "the other has all to compute, as far as is known"
    assert bench.cache.accounts[slow].position == 0
    bench.ledger.close()


def test_when_the_leader_ends_early_the_next_computes_and_the_others_wait_for_it(bench: Bench) -> None:
    first, second, third = ask(bench, 2), ask(bench, 2), ask(bench, 2)
    bench.receive(Free([bench.granted(first).state], closes_grant=first))
    assert bench.granted(second).hit.cached_tokens == 0 and not is_granted(bench, third)
    assert bench.of(Mark) == [Mark(first, 129), Mark(second, 129)]
    bench.receive(Cancel(third))
    bench.receive(Free([bench.granted(second).state], closes_grant=second))
    assert not is_granted(bench, third)
    bench.ledger.close()


def test_when_the_position_has_passed_each_computes_by_itself(bench: Bench) -> None:
    first, second, third = ask(bench, 2), ask(bench, 2), ask(bench, 2)
    bench.receive(Passed(first, 129))
    assert bench.granted(second).hit.cached_tokens == 0, "it computes by itself"
    assert not is_granted(bench, third) and bench.of(Mark)[-1] == Mark(second, 129)
    bench.receive(Passed(99, 129))
    bench.ledger.close()


def test_a_checkpoint_that_others_wait_for_may_evict_any_state() -> None:
    bench = Bench(slots=2)
    bench.run([7] * 5000)
    first = ask(bench, 2)
    second = ask(bench, 2)
    assert bench.of(Mark) == [Mark(first, 129)] and bench.states == [5000]
    assert len(bench.spares(first, 129)) == 1 and bench.states == []
    alone = Bench(slots=1)
    first, second = ask(alone, 2), ask(alone, 2)
    assert alone.spares(first, 129) == [] and not is_granted(alone, second)
    assert alone.cache.allocator.grant_waits_for_slot, "now it waits for a slot like any other"
    bench.ledger.close()
    alone.ledger.close()


def test_no_acquire_waits_for_ever(bench: Bench) -> None:
    """After MAX_LEADERS leaders that ended early the Acquire is granted, though another request could be waited for."""
    leader, last = ask(bench, 2), ask(bench, 2, priority=1)
    for _ in range(MAX_LEADERS):
        assert not is_granted(bench, last)
        following = ask(bench, 2)
        bench.receive(Free([bench.granted(leader).state], closes_grant=leader))
        leader = following
    assert is_granted(bench, leader) and is_granted(bench, last)
    bench.ledger.close()


def test_no_acquire_waits_for_a_state_that_a_flush_has_made_worthless(bench: Bench) -> None:
    first = ask(bench, 2)
    waited = ask(bench, 3)
    assert not is_granted(bench, waited)
    bench.receive(Flush(1))
    assert is_granted(bench, waited), "what it waited for will not be kept"
    assert bench.of(Mark) == [Mark(first, 100)]
    assert not is_granted(bench, ask(bench, 3)), "it waits for the new one"
    assert bench.of(Mark)[-1].grant == waited
