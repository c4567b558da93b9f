"""Masks that come late, in random schedules: every situation is reached in which they are awaited."""

from collections import Counter

import pytest

from baton.actors.forward.actor import Forward
from baton.actors.grants import RowMask
from baton.actors.messages import Message
from baton.actors.requests import RetireReason
from baton.actors.scheduler.actor import Scheduler
from baton.actors.scheduler.rows import RunningRows
from tests.simulation.driver import Simulation
from tests.simulation.scenario import draw

EXPECTED = {
    *("end: finished", "end: failed", "retire: limit", "retire: aborted", "retire: capacity"),
    *("Abort", "Pause", "Drain", "Filled", "restart", "a row had retired", "its index was used again"),
}


class Situations:
    """Counts of what happens in simulations while a step waits for late masks."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.reached = Counter[str]()
        end, retire, receive, restart = RunningRows.end, RunningRows.retire, Scheduler.receive, Simulation._restart
        mask = Forward._mask

        def noted_end(rows: RunningRows, grants: list[int], reason: RetireReason) -> None:
            self.reached[f"end: {reason}"] += bool(rows.state.late & set(grants))
            end(rows, grants, reason)

        def noted_retire(rows: RunningRows, grant: int, reason: RetireReason) -> None:
            self.reached[f"retire: {reason}"] += grant in rows.state.late & rows.state.rows.keys()
            retire(rows, grant, reason)

        def noted_receive(scheduler: Scheduler, message: Message) -> None:
            self.reached[type(message).__name__] += bool(scheduler.state.late)
            receive(scheduler, message)

        def noted_restart(simulation: Simulation, actor: str) -> None:
            self.reached["restart"] += bool(simulation.unit.scheduler.state.late)
            restart(simulation, actor)

        def noted_mask(forward: Forward, masks: list[RowMask]) -> None:
            assert forward._late is not None
            rows = forward._late[1]
            gone = {index for grant, index in rows.items() if grant not in forward.rows}
            others = {row.index for row in forward.rows.values() if row.grant not in rows}
            self.reached["a row had retired"] += bool(gone)
            self.reached["its index was used again"] += bool(gone & others)
            mask(forward, masks)

        for owner, name, noted in (
            (RunningRows, "end", noted_end),
            (RunningRows, "retire", noted_retire),
            (Scheduler, "receive", noted_receive),
            (Simulation, "_restart", noted_restart),
            (Forward, "_mask", noted_mask),
        ):
            patch.setattr(owner, name, noted)


def test_every_situation_with_late_masks_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    situations = Situations(monkeypatch)
    for seed in range(600):
        Simulation(draw(seed)).run()
        if (+situations.reached).keys() >= EXPECTED:
            return
    pytest.fail(f"not reached: {EXPECTED - (+situations.reached).keys()}")


def test_a_step_may_fail_before_its_late_masks_come() -> None:
    """As where the model raises, or where a row could not be set up."""
    failed = 0
    for seed in (seed for seed in range(200) if draw(seed).faults):
        simulation = Simulation(draw(seed))
        simulation.device.bad_launches = set(range(seed % 5 + 2, 100, 5))
        simulation.run()
        failed += simulation.device.failed_early
        if failed >= 10:
            return
    pytest.fail(f"only {failed} steps failed so")
