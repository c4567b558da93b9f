"""Random schedules of the whole ring over the hash model: every token, every state and every lease is checked."""

import pytest

from tests.simulation.driver import Simulation

FAILED_ONCE = [31, 34, 83]  # a lone request finished before the pool was full


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_seeds(first: int) -> None:
    for seed in range(first, first + 50):
        Simulation(seed).run()


@pytest.mark.parametrize("seed", FAILED_ONCE)
def test_seeds_that_failed_once(seed: int) -> None:
    Simulation(seed).run(check_every=1)


@pytest.mark.soak
def test_many_seeds() -> None:
    for seed in range(1_000, 11_000):
        Simulation(seed).run()


def test_a_seed_replays_exactly() -> None:
    first, second = Simulation(7), Simulation(7)
    first.run()
    second.run()
    assert first.trace == second.trace and len(first.trace) > 100


def test_the_seeds_reach_what_they_are_for() -> None:
    """Cached prefixes, evictions, retractions, flushes and refused requests all occur in the seeds above."""
    reached: dict[str, int] = {}
    for seed in range(150):
        simulation = Simulation(seed)
        simulation.run()
        for counters in (simulation.cache.counters, simulation.scheduler.counters):
            for name, value in counters.items():
                reached[name] = reached.get(name, 0) + value
        for asked in simulation.client.asked.values():
            reached[str(asked.end)] = reached.get(str(asked.end), 0) + 1
    expected = {
        "prefix_cache_hits",
        "evicted_states",
        "evicted_pages",
        "flushes",
        "rows_retracted",
        "checkpoints_granted",
        "checkpoints_skipped",
        "queue_full",
        "abort",
        "aborted",
        "stop",
        "length",
    }
    assert expected <= {name for name, value in reached.items() if value}
