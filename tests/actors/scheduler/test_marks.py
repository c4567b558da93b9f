"""A state that other requests wait for (Mark): either the row saves it, or Passed reports that it will not come."""

from typing import Any

import pytest

from baton.actors.kinds import Kind
from baton.actors.messages import Mark, Passed, Retire, Settled, Spare, Step, Want
from baton.actors.scheduler.strategy import MOST_AT_ONCE, Strategy
from tests.actors.scheduler.test_scheduler import Bench


def running(prompt: int, **limits: Any) -> Bench:
    """Return a bench with one row, grant 1, whose prompt has `prompt` tokens."""
    bench = Bench(min_saving=1 << 20, **limits)
    bench.submit("a", list(range(prompt)))
    bench.grant(1)
    return bench


def spares(bench: Bench, number: int, denied: list[int]) -> None:
    leases = [lease for _ in range(number) if (lease := bench.ledger.take("scheduler")) is not None]
    bench.receive(Spare(1, leases, denied))


def saved(bench: Bench) -> list[int]:
    steps = [step for step in bench.of(Step) if isinstance(step, Step)]
    return [checkpoint.position for step in steps for checkpoint in step.checkpoints]


def test_a_marked_position_gets_a_slot_and_is_saved() -> None:
    bench = running(20, step_tokens=4)
    bench.receive(Mark(1, 10))
    bench.receive(Settled(1, []))
    assert bench.of(Want) == [Want(1, [(10, Kind.BRANCH)])]
    assert bench.scheduler.state.rows[1].requested == {10}, "the slot that comes is for it"
    spares(bench, 1, [])
    bench.receive(Settled(2, []))
    assert saved(bench) == [10] and not bench.of(Passed)
    bench.ledger.close()


def test_a_mark_at_a_position_already_passed_is_answered_with_passed() -> None:
    bench = running(20, step_tokens=4)
    bench.receive(Mark(1, 8))
    assert bench.of(Passed) == [Passed(1, 8)], "two steps are under way"
    bench.ledger.close()


def test_a_mark_at_a_position_being_saved_needs_no_answer() -> None:
    bench = running(20, step_tokens=16, depth=1)
    bench.receive(Mark(1, 18))
    spares(bench, 1, [])
    bench.receive(Settled(1, []))
    assert saved(bench) == [18]
    bench.receive(Mark(1, 18))
    assert not bench.of(Passed)
    bench.receive(Mark(1, 17))
    assert bench.of(Passed) == [Passed(1, 17)]
    bench.ledger.close()


def test_a_mark_for_a_retired_row_needs_no_answer() -> None:
    """The row's states are on their way to the cache, whose account for the grant closes with the last of them."""
    bench = running(20)
    bench.receive(Settled(1, [1]))
    assert bench.of(Retire) == [Retire(1, "finished", 21)]
    bench.receive(Mark(1, 18))
    assert not bench.of(Passed)
    bench.ledger.close()


@pytest.mark.parametrize("position", [2, 10])
def test_a_mark_is_answered_with_passed_if_the_strategy_keeps_no_checkpoints(position: int) -> None:
    bench = running(20, step_tokens=4, strategy=Strategy.NO_BUFFER)
    bench.receive(Mark(1, position))
    assert bench.of(Passed) == [Passed(1, position)] and not bench.of(Want)
    bench.ledger.close()


def test_a_marked_position_without_a_slot_is_answered_with_passed() -> None:
    """If a step crosses more marked positions than a row may have checkpoint slots, only the deepest are saved."""
    bench = running(40, step_tokens=16, depth=1)
    marks = [18, 20, 22, 24, 26, 28]
    for position in marks:
        bench.scheduler.receive(Mark(1, position))
    bench.receive(Settled(1, []))
    [want] = bench.of(Want)
    assert want == Want(1, [(position, Kind.BRANCH) for position in reversed(marks[-MOST_AT_ONCE:])])
    spares(bench, MOST_AT_ONCE, [])
    assert saved(bench) == marks[-MOST_AT_ONCE:]
    assert bench.of(Passed) == [Passed(1, position) for position in reversed(marks[:-MOST_AT_ONCE])]
    bench.ledger.close()


def test_a_marked_position_that_was_denied_a_slot_needs_no_answer() -> None:
    bench = running(20, step_tokens=16, depth=1)
    bench.receive(Mark(1, 18))
    spares(bench, 0, [18])
    bench.receive(Settled(1, []))
    assert saved(bench) == [] and not bench.of(Passed)
    bench.ledger.close()
