"""Sessions in the simulator: which commands and tiers the seeds reach, and many sessions on a few slots."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from baton.actors.cache.below.limits import TierLimits
from baton.actors.scheduler.plan import Limits
from tests.simulation.driver import Simulation
from tests.simulation.scenario import Ask, Crash, Scenario, draw
from tests.simulation.talks import Command, Talk, Turn

STATE, TOKEN = 1000, 10


def many_sessions(number: int, seed: int) -> Scenario:
    """Return a scenario of sessions with three turns each on 16 slots.

    Host memory fits the copies of a tenth of the sessions, and the disk fits the copies of all.
    """
    rng = random.Random(seed)
    talks = [talk(rng, f"s{index}", 40.0 * rng.random() * number) for index in range(number)]
    one = TierLimits(0, 0, STATE, TOKEN)
    return Scenario(
        slots=16,
        pages=160,
        limits=Limits(max_running=6, max_queue=2 * number, step_tokens=32, page_size=4),
        max_tree_tokens=1 << 22,
        codec=False,
        step_time=0.0,
        lazy=None,
        asks=(),
        faults=(),
        schedule=seed,
        talks=tuple(talks),
        tiers=TierLimits(number // 10 * one.memory_bytes(20), number * one.file_bytes(24), STATE, TOKEN),
        disk_time=2.0,
    )


def talk(rng: random.Random, name: str, at: float) -> Talk:
    turns = []
    for index in range(3):
        prompt = tuple(rng.randrange(61) for _ in range(8 if index == 0 else 2))
        turns.append(Turn(Ask(f"{name}.{index}", rng.choice([0.0, 500.0, 2000.0]) * rng.random(), prompt, 3)))
    return Talk(name, at, "", tuple(turns), (Command(0, "ended", 0.0, "suspend"),) if rng.random() < 0.1 else ())


def check_many_sessions(number: int) -> None:
    """Run this many sessions. Check that most turns resume from copies, and that no copy is left at the end."""
    simulation = Simulation(many_sessions(number, 1))
    simulation.most_turns = 2000 * number
    simulation.run()
    reached, client = simulation.counters, simulation.client
    assert len(client.exchanges) == 3 * number and {each.end for each in client.exchanges} <= {"length", "stop"}
    below = reached["goes on from host"] + reached["goes on from disk"]
    assert below > 1.8 * number, f"{below} of {2 * number} turns resumed from a copy"
    assert not simulation.device.vault and not simulation.disk.stored


def test_many_sessions_on_sixteen_slots() -> None:
    """Every turn is answered correctly, limits hold after each delivery, and nothing is left at the end."""
    check_many_sessions(200)


@pytest.mark.soak
def test_a_thousand_sessions_on_sixteen_slots() -> None:
    check_many_sessions(1000)


def test_every_command_and_tier_of_sessions_is_reached() -> None:
    expected = {
        *(f"session {how}" for how in ("suspended", "forked", "forked in a turn", "branched", "rewound")),
        *(f"session {how}" for how in ("closed", "closed in a turn")),
        *(f"suspended to {tier}" for tier in ("slot", "host", "disk", "tokens")),
        *(f"goes on from {tier}" for tier in ("slot", "tree", "host", "disk", "tokens")),
        *("written file", "read file", "deleted file", "failed write", "damaged file"),
        *("retracted", "resubmitted", "client gone"),
    }
    reached: Counter[str] = Counter()
    for seed in (seed for seed in range(600) if draw(seed).talks):
        simulation = Simulation(seed)
        simulation.run()
        reached += simulation.counters
        if expected <= reached.keys():
            break
    assert expected <= reached.keys(), expected - reached.keys()


def test_a_kill_during_writes_costs_only_time() -> None:
    """The restart loses calls of a slow disk. All turns are still right, and other copies are still used."""
    expected = Counter(
        {"crash cache": 11, "calls lost in a restart": 3, "suspended to disk": 51, "goes on from disk": 1}
    )
    reached: Counter[str] = Counter()
    for seed in (seed for seed in range(500) if draw(seed).talks):
        scenario = draw(seed).with_faults(Crash("cache", 120, "send"))
        roomy = replace(scenario.tiers, host_bytes=1 << 20, disk_bytes=1 << 20, session_slots=0)
        simulation = Simulation(replace(scenario, tiers=roomy, disk_time=60.0, hand_over=True))
        simulation.run()
        reached += simulation.counters
        if expected <= reached:
            break
    assert expected <= reached, expected - reached
