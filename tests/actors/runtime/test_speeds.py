"""The device's speeds: measured by a wrapper of the device, and reported to the cache."""

import asyncio
import statistics
import time
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from baton.actors.cache.worth.order import Costs
from baton.actors.control import Speeds
from baton.actors.forward.device import Work, WorkChunk, WorkCommit, WorkDraft, WorkPrediction
from baton.actors.forward.launching import Device, Done
from baton.actors.messages import Ran, Transferred
from baton.actors.runtime.speeds import REMEMBERED, Line, Pace, measured
from baton.actors.scheduler.plan import Limits, SchedulerState, is_to_be_timed, tokens_in_time
from baton.models.hash import HashModel
from tests.actors.ring import running

MODEL: Any = HashModel(vocab_size=61, chunk_size=8, max_position=1024)


class Sleeper:
    """A device whose calls take `takes` seconds of an artificial clock."""

    def __init__(self) -> None:
        self.takes, self.cleared = 1.0, list[int]()

    def clear(self, slot: int) -> None:
        self.cleared.append(slot)

    def launch(self, work: Work) -> Done[Ran]:
        return Done(Ran(work.step, b"", [], []), self.takes)

    def export(self, key: int, slot: int, pages: list[int], position: int) -> Done[Transferred]:
        return Done(Transferred(key), self.takes)

    def fill(self, grant: int, key: int, slot: int, pages: list[int], first_page: int) -> Done[Transferred]:
        return Done(Transferred(key, grant), self.takes)


def run(device: Device, work: Work) -> None:
    device.launch(work).collect()


def test_prompts_and_copies_are_measured() -> None:
    sleeper, reports = Sleeper(), list[Speeds]()
    costs = Costs(compute=2.0, attend=1.0, slot=100.0, token=10.0)
    device = measured(sleeper, costs, 4, reports.append)  # type: ignore[arg-type]
    device.clear(3)
    run(device, Work(1, [WorkChunk(0, 10, 25, True)], [], [], []))
    assert sleeper.cleared == [3] and reports.pop().operation == 0.0, "fifteen tokens say little"
    run(device, Work(2, [WorkChunk(0, 10, 30, True)], [1], [5], []))
    operations = 2 * 20 + (900 - 100) / 2 + 2 + (36 - 25) / 2
    assert reports.pop().operation == 1 / operations
    device.export(1, 3, [7], 20).collect()
    last = reports.pop()
    assert (last.operation, last.byte) == (1 / operations, 1 / 300)
    device.fill(2, 1, 3, [7, 8, 9, 10, 11], 0).collect()
    assert not reports, "that is as it was"
    sleeper.takes = 2.0
    device.fill(2, 1, 3, [7, 8, 9, 10, 11], 0).collect()
    assert len(reports) == 1 and 1 / 300 < reports[0].byte < 2 / 300


def test_a_step_in_which_the_process_was_stopped_does_not_count() -> None:
    """Its processor time stands still meanwhile. A device that stays slow counts from the second slow step on."""
    sleeper, reports, processor = Sleeper(), list[Speeds](), iter(range(10**6))
    device = measured(sleeper, Costs(), 4, reports.append, lambda: 1e-9 * next(processor))  # type: ignore[arg-type]
    step = Work(1, [], [0], [4], [])
    for _ in range(3):
        run(device, step)
        run(device, Work(1, [WorkChunk(1, 0, 20, True)], [], [], []))
    known = reports[-1]
    sleeper.takes = 300.0
    run(device, step)
    sleeper.takes = 1.0
    run(device, step)
    sleeper.takes = 300.0
    run(device, Work(1, [WorkChunk(1, 0, 20, True)], [], [], []))
    assert reports[-1] == known
    run(device, step)
    assert reports[-1].decode > known.decode


def test_a_long_step_that_computes_counts() -> None:
    sleeper, reports, processor = Sleeper(), list[Speeds](), iter(range(0, 10**6, 40))
    device = measured(sleeper, Costs(), 4, reports.append, lambda: next(processor))  # type: ignore[arg-type]
    run(device, Work(1, [], [0], [4], []))
    sleeper.takes = 300.0
    run(device, Work(1, [], [0], [4], []))
    assert reports[-1].decode > 100


def test_the_extra_time_of_mixed_steps_is_measured() -> None:
    sleeper, reports = Sleeper(), list[Speeds]()
    device = measured(sleeper, Costs(), 4, reports.append)  # type: ignore[arg-type]
    run(device, Work(1, [WorkChunk(0, 0, 4, True)], [], [], []))
    assert (reports[-1].decode, reports[-1].prompt) == (0.0, 0.25), "as long as nothing else is known"
    run(device, Work(2, [], [0], [4], []))
    assert (reports[-1].decode, reports[-1].prompt) == (1.0, 0.25)
    sleeper.takes = 3.0
    run(device, Work(3, [WorkChunk(1, 0, 8, True)], [0], [5], []))
    assert reports[-1].decode == 1.0
    assert reports[-1].prompt == (REMEMBERED * 1 + 2) / (REMEMBERED * 4 + 8)
    before = len(reports)
    run(device, Work(4, [WorkChunk(1, 8, 80, True)], [], [], []))
    assert reports[-1].prompt == reports[before - 1].prompt, "that was beside none"


def test_the_fixed_cost_of_a_step_is_separated_from_that_of_its_tokens() -> None:
    line = Line()
    assert line.parts == (0.0, 0.0)
    for _ in range(50):
        line.add(16, 1.16)
    assert line.parts == pytest.approx((1.16 / 16, 0.0)), "of one size all is in proportion"
    line.add(32, 1.32)
    each, step = line.parts
    assert 0.01 < each < 0.05 and step == pytest.approx(1.163 - each * 16.37, abs=0.01)
    for tokens in (200, 400):
        line.add(tokens, 1 + 0.01 * tokens)
    assert line.parts == pytest.approx((0.01, 1.0), rel=0.05)
    line.add(400, 0.0)
    assert all(part > 0 for part in line.parts), "more tokens never take less time"


@pytest.mark.parametrize(("step_s", "token_s", "tokens"), [(0.002, 2e-5, 100), (0.0, 1e-3, 16), (0.0, 3e-5, 40)])
def test_prompt_tokens_of_mixed_steps_converge(step_s: float, token_s: float, tokens: int) -> None:
    """A decode-only step takes 0.4 ms. If mixed steps have a large fixed cost, chunks must grow beyond 16 tokens."""
    noise = Random(1)
    state = SchedulerState(Limits(step_tokens=512))
    sleeper = Sleeper()
    device = measured(sleeper, Costs(), 4, lambda speeds: setattr(state, "speeds", speeds))  # type: ignore[arg-type]
    sleeper.takes = 0.0004
    run(device, Work(0, [], [0], [4], []))
    chunks = list[int]()
    for state.steps in range(400):
        chunks.append(min(tokens_in_time(state), 400))
        sleeper.takes = 0.0004 + (step_s + token_s * chunks[-1]) * noise.uniform(0.8, 1.2)
        run(device, Work(state.steps, [WorkChunk(1, 0, chunks[-1], True)], [0], [4], []))
    assert statistics.median(chunks[200:]) == pytest.approx(tokens, rel=0.4)


def test_more_rows_that_decode_while_prompts_wait_give_prompts_more_time() -> None:
    """A step takes 5 ms and 2 ms a row. At first one row decodes, then sixteen, while prompts always wait."""
    limits, sleeper = Limits(step_tokens=512), Sleeper()
    state = SchedulerState(limits)
    device = measured(sleeper, Costs(), 4, lambda speeds: setattr(state, "speeds", speeds))  # type: ignore[arg-type]

    def step(rows: int, tokens: int) -> float:
        sleeper.takes = 0.005 + 0.002 * rows + 0.001 * tokens
        chunks = [WorkChunk(99, 0, tokens, True)] if tokens else []
        run(device, Work(state.steps, chunks, [*range(rows)], [8] * rows, []))
        return sleeper.takes

    step(0, 100)
    for tokens in (0, 16, 21, 16, 21):
        step(1, tokens)
    assert tokens_in_time(state) <= 25, "four steps of 7 ms"
    times = list[float]()
    for state.steps in range(1, 64):
        times.append(step(16, 0 if is_to_be_timed(state, 16) else tokens_in_time(state)))
    assert times[0] < times[-1] == pytest.approx(4 * 0.037, rel=0.1), "four steps of 37 ms"


def test_a_first_step_of_more_rows_that_takes_longer_does_not_count() -> None:
    """It is recorded for later ones. Prompts that are fed from then on would get too much time."""
    sleeper, reports = Sleeper(), list[Speeds]()
    device = measured(sleeper, Costs(), 4, reports.append)  # type: ignore[arg-type]
    for rows, takes in ((1, 1.0), (1, 1.0), (8, 8.0)):
        sleeper.takes = takes
        run(device, Work(1, [], [*range(rows)], [8] * rows, []))
    assert (reports[-1].decode, reports[-1].rows) == (1.0, 1), "so that it is measured again soon"
    sleeper.takes = 3.0
    run(device, Work(1, [], [*range(8)], [8] * 8, []))
    assert (reports[-1].decode, reports[-1].rows) == (3.0, 8)


def test_old_measurements_count_less() -> None:
    pace = Pace()
    assert pace.value == 0.0
    pace.add(1.0, 40.0)
    assert pace.value == 40.0
    pace.add(1.0, 4.0)
    assert pace.value == 4.0, "the first one took longer than those after it"
    pace.add(1.0, 8.0, is_new=True)
    assert pace.value == 4.0, "the first one of another size took longer too"
    pace.add(1.0, 1.0, is_new=True)
    assert pace.value == (4 * REMEMBERED + 1) / (REMEMBERED + 1)


def test_the_cache_of_a_ring_gets_the_speeds_and_so_does_its_successor() -> None:
    async def scenario() -> None:
        async with running(MODEL, restarts=1) as ring:
            await ring.ask([1] * 40, 2)
            await asyncio.sleep(0)
            before = vars(ring.relay.unit.cache.tiers.ranking.prices)["_speeds"]
            assert before.operation > 0
            old, ring.relay.unit.cache.receive = ring.relay.unit, fail  # type: ignore[method-assign]
            await ring.ask([2], 1)
            assert ring.relay.unit is not old
            assert vars(ring.relay.unit.cache.tiers.ranking.prices)["_speeds"].operation > 0

    def fail(message: object) -> None:
        raise RuntimeError("injected")

    asyncio.run(scenario())


def test_the_cost_of_a_draft_is_measured_against_steps_with_as_many_rows() -> None:
    sleeper, reports = Sleeper(), list[Speeds]()
    device = measured(sleeper, Costs(), 4, reports.append)  # type: ignore[arg-type]
    drafts = [WorkDraft(0, 0, (7, 8)), WorkDraft(1, 2, (9, 10))]
    sleeper.takes = 3.0
    run(device, Work(1, [], [0, 1], [4, 4], [], [], drafts))
    assert not any(report.draft for report in reports), "no step without drafts is known"
    sleeper.takes = 1.0
    run(device, Work(2, [], [0, 1], [5, 5], []))
    run(device, Work(3, [], [0], [6], []))
    sleeper.takes = 1.4
    run(device, Work(4, [], [0, 1], [6, 6], [], [], drafts))
    assert reports[-1].draft == pytest.approx(0.1) and reports[-1].decode == 1.0
    run(device, Work(0, [], [], [], [], commits=[WorkCommit(0, 1, 9)]))
    assert reports[-1].decode == 1.0, "putting accepted drafts into a state is no step"
    before = reports[-1]
    sleeper.takes = 5.0
    for _ in range(20):
        run(device, Work(5, [], [0], [9], [], [], [WorkDraft(0, 2, ())]))
    assert replace(reports[-1], turn=before.turn) == before, (
        "a step that also replays drafts says nothing about prompts or steps without drafts"
    )


def test_the_wait_after_a_step_with_drafts_is_measured() -> None:
    sleeper, reports = Sleeper(), list[Speeds]()
    device = measured(sleeper, Costs(), 4, reports.append)  # type: ignore[arg-type]
    run(device, Work(1, [], [0], [4], []))
    run(device, Work(2, [], [0], [5], [], [], [WorkDraft(0, 0, (7,))]))
    time.sleep(0.02)
    run(device, Work(3, [], [0], [7], []))
    assert 0.02 <= reports[-1].turn < 0.5


def test_the_cost_of_a_predicted_token_is_measured_apart_from_that_of_a_draft() -> None:
    sleeper, reports = Sleeper(), list[Speeds]()
    device = measured(sleeper, Costs(), 4, reports.append)  # type: ignore[arg-type]
    predictions, drafts = [WorkPrediction(0, 4), WorkPrediction(1, 2)], [WorkDraft(0, 0, (7, 8))]
    sleeper.takes = 1.0
    run(device, Work(1, [], [0, 1], [4, 4], []))
    sleeper.takes = 1.8
    run(device, Work(2, [], [0, 1], [5, 5], [], predictions=predictions))
    assert reports[-1].prediction == pytest.approx(0.2) and reports[-1].decode == 1.0
    sleeper.takes = 2.0
    run(device, Work(3, [], [0, 1], [6, 6], [], drafts=drafts, predictions=predictions))
    assert reports[-1].draft == pytest.approx(0.1) and reports[-1].prediction == pytest.approx(0.2)
    time.sleep(0.01)
    run(device, Work(4, [], [0, 1], [8, 7], []))
    assert reports[-1].turn > 0.004, "the scheduler waits after predictions too"
