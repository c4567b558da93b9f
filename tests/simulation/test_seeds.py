"""Random schedules of the whole ring with the hash model; every token, state, page and lease is checked."""

from collections import Counter
from collections.abc import Iterable

import pytest

from baton.actors.scheduler.strategy import Strategy
from tests.simulation.driver import Simulation
from tests.simulation.scenario import UNIT, BadStep, draw

# Seeds that failed before a bug was fixed. These bugs are also planted in test_mutations.py.
FAILED_ONCE = [
    2,  # a request that arrived after a shutdown was served
    61,  # a full queue refused requests that had been accepted before a restart
    70,  # a request that fills the pool was restarted
    139,  # an id was used again before the previous row with this id was gone
    3011485,  # a request that waited for its id to become free was refused by a later shutdown
    142,  # a request that ran alone ended before the pool was full
    205,  # a grant resumed from the state that was evicted to make room for it
    202,  # a row counted as stuck while a session's state was leaving the pool
    7969,  # after a failed turn the api had an outdated tier and position of the session's state
    40298,  # a damaged file was reported as the tier of a session's state
    103198,  # a copy was evicted to make room in host memory for itself
    110933,  # a turn that ended before its first step was saved before its slot had been filled
    7017742,  # a suspension was answered by the failed write of an older copy of the session
]


# Seeds found when steps could be narrower than the batch (may_be_narrow), before generation could be paused.
FAILED_SINCE = [
    9071,  # a fork that was rewound kept the name of a copy on its former path
    9205427,  # a session's state was evicted for the session's next turn, which then did not get the slot
]


# Seeds found since masks may come late.
FAILED_WITH_LATE_MASKS = [
    1000312,  # a late mask came for a row that was left out of its step, because it could not grow
]

# Seeds found before requests could have grammars.
FAILED_BEFORE_GRAMMARS = [
    7000566,  # a pause with mode "retract", followed at once by one in place, was never answered
]


def run(seeds: Iterable[int], **options: object) -> Counter[str]:
    reached: Counter[str] = Counter()
    for seed in seeds:
        simulation = Simulation(draw(seed, **options))
        try:
            simulation.run()
        except Exception as error:
            error.add_note(f"seed {seed} {options or ''}: scripts/simulate --first-seed {seed} --seeds 1")
            raise
        reached += simulation.counters
    return reached


@pytest.mark.parametrize("part", range(5))
def test_fresh_seeds(first_seed: int, part: int) -> None:
    run(range(first_seed + 100 * part, first_seed + 100 * (part + 1)))


def test_seeds_that_failed_once() -> None:
    run(
        FAILED_ONCE,
        may_be_narrow=False,
        may_pause=False,
        bad_calls=False,
        has_flows=False,
        copies_aside=False,
        has_grammars=False,
        may_draft=False,
    )
    before_grammars = {"has_grammars": False, "may_draft": False}
    run(FAILED_BEFORE_GRAMMARS, **before_grammars)
    run(FAILED_WITH_LATE_MASKS)
    run(FAILED_SINCE, may_pause=False, bad_calls=False, has_flows=False, copies_aside=False, **before_grammars)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("strategy", Strategy)
def test_every_strategy(strategy: Strategy, overlap: bool) -> None:
    run(range(20), strategy=strategy, overlap=overlap)


@pytest.mark.soak
@pytest.mark.parametrize("part", range(10))
def test_many_seeds(first_seed: int, part: int) -> None:
    run(range(first_seed + 1000 * (part + 1), first_seed + 1000 * (part + 2)))


def test_a_seed_replays_exactly() -> None:
    first, second = Simulation(7, tracing=True), Simulation(7, tracing=True)
    first.run()
    second.run()
    assert first.trace == second.trace and len(first.trace) > 100


def test_a_trace_changes_nothing() -> None:
    plain, traced = Simulation(8), Simulation(8, tracing=True)
    plain.run()
    traced.run()
    assert (plain.now, plain.delivered, plain.counters) == (traced.now, traced.delivered, traced.counters)


def test_every_fault_and_its_consequences_are_reached() -> None:
    expected = {
        *(f"crash {actor}" for actor in UNIT),
        *(f"client {how}" for how in ("aborted", "timeout", "gone")),
        *(f"ended {how}" for how in ("stop", "length", "abort", "error", "aborted", "timeout")),
        *(f"ended {how}" for how in ("queue_full", "too_large", "draining")),
        *(
            "bad step",
            "bad open_row",
            "bad clear",
            "bad export",
            "poisoned step",
            "refused send",
            "duplicate id",
            "shutdown in flight",
            "resubmitted",
        ),
        *("no room", "no checkpoint slot", "flushes", "retracted", "rows_capacity", "replayed"),
        *("prefix_cache_hits", "evicted_states", "evicted_pages", "moved states", "page copies"),
        *("checkpoints_granted", "checkpoints_skipped"),
        *("constrained stop", "constrained length", "constrained grammar"),
        *("paused", "pause in_place of requests", "pause retract of requests"),
    }
    reached: Counter[str] = Counter()
    for seed in range(150):
        reached += run([seed])
        if expected <= reached.keys():
            break
    assert expected <= reached.keys(), expected - reached.keys()


def test_one_bad_step_costs_no_request_its_answer() -> None:
    """Every row of a step that raises once is answered correctly, without an error."""
    reached: Counter[str] = Counter()
    for seed in range(40):
        simulation = Simulation(draw(seed, has_grammars=False).with_faults(BadStep(5)))
        simulation.run()
        reached += simulation.counters
    assert reached["bad step"] > 30 and reached["replayed"] > 30 and not reached["ended error"]
