"""Requests with a common prefix, which the first request (the leader) computes while the others wait for it.

A strike aborts, retracts or fails the leader. The tests strike it at every point of its progress.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, TypeAlias

import pytest

from baton.actors.scheduler.plan import Limits
from baton.actors.scheduler.strategy import Strategy
from tests.simulation.driver import Simulation
from tests.simulation.hash_device import Row
from tests.simulation.scenario import Ask, BadStep, Leave, PausedFrom, Poison, Scenario

Prompts: TypeAlias = tuple[tuple[int, ...], ...]
Strike: TypeAlias = Literal["aborted", "retracted", "all retracted", "step fails", "fails for good", "all given up"]

STEM = tuple(range(1, 25))
ANSWER, STEP_TOKENS = 2, 8
# The first prompt in each tuple is the leader's.
CHOICES: Prompts = (STEM,) * 4
STEMMED: Prompts = tuple((*STEM, *range(first, first + 6)) for first in (30, 36, 42, 48))
CHOICES_OF_TWO: Prompts = (STEMMED[0], STEMMED[0], STEMMED[1], STEMMED[1])


@dataclass(frozen=True)
class World:
    """The pools and limits of a test ring."""

    pages: int = 0  # number of pages of four tokens; 0 without attention
    depth: int = 2  # how many steps may be in flight
    strategy: Strategy = Strategy.JUST_IN_TIME
    slots: int = 16
    schedule: int = 1  # the seed of everything drawn during the run

    def scenario(self, prompts: Prompts) -> Scenario:
        page_size = 4 if self.pages else 0
        shape = {"page_size": page_size, "min_saving": 1, "depth": self.depth}
        limits = Limits(6, 100, STEP_TOKENS, strategy=self.strategy, **shape)
        return Scenario(
            slots=self.slots,
            pages=self.pages,
            limits=limits,
            max_tree_tokens=1 << 22,
            codec=False,
            step_time=0.0,
            lazy=None,
            asks=tuple(Ask(f"r{index}", float(index), prompt, ANSWER) for index, prompt in enumerate(prompts)),
            faults=(),
            schedule=self.schedule,
            worth_waiting=4,
        )


WIDE, PAGED = World(), World(pages=60, depth=1)
NARROW = World(pages=60, strategy=Strategy.EXTRA_BUFFER, slots=5)


class Group(Simulation):
    """A simulation that counts how many prompt tokens the device computes."""

    def __init__(self, scenario: Scenario, retracted_at: int | None = None) -> None:
        super().__init__(scenario)
        self.computed = 0  # prompt tokens
        self.points: int | None = None  # number of turns until the leader ended
        self.ended_before = 0  # how many other requests ended before the leader
        self._retracted_at = retracted_at  # the turn in which to retract the leader; None: never
        self._faulty, self.device._fault = self.device._fault, self._count

    def _count(self, run: int, moved: list[tuple[Row, int, int]]) -> str:
        self.computed += sum(max(0, min(stop, row.request.prompt_len) - start) for row, start, stop in moved)
        return self._faulty(run, moved)

    def _turn(self) -> bool:
        if self._retracted_at is not None and self.now >= self._retracted_at:
            self._retracted_at = None
            self._retract()
        exchanges = self.client.exchanges
        if self.points is None and exchanges and exchanges[0].end is not None:
            self.points = int(self.now)
            self.ended_before = sum(other.end is not None for other in exchanges) - 1
        return super()._turn()

    def _retract(self) -> None:
        """Retract the leader between two messages, as the plan does when pages or rows are scarce."""
        scheduler = self.unit.scheduler
        for row in list(scheduler.state.rows.values()):
            if row.record.request.id == "r0":
                scheduler.rows.retire(row.grant, "retracted")
                self._ready_to("act", "scheduler")


def run(scenario: Scenario, retracted_at: int | None = None) -> Group:
    """Run the scenario, with all checks of the simulation."""
    group = Group(scenario, retracted_at)
    group.run()
    return group


def run_with_strikes(strike: Strike, scenario: Scenario, undisturbed: Group) -> Iterator[Group]:
    """Run the scenario once for each point of the leader's progress, and strike the leader at that point."""
    leader, *others = scenario.asks
    assert undisturbed.points is not None
    for at in range(undisturbed.points):
        match strike:
            case "aborted":
                gone = replace(leader, leave=Leave("aborted", at, None))
                yield run(replace(scenario, asks=(gone, *others)))
            case "retracted":
                yield run(scenario, retracted_at=at)
            case "all retracted":
                yield run(scenario.with_faults(PausedFrom(at, at + 5, ("retract",))))
            case "all given up":
                asks = [replace(ask, leave=Leave("gone", at * (1 + ask.at), None)) for ask in scenario.asks[:-1]]
                yield run(replace(scenario, asks=(*asks, scenario.asks[-1])))
            case "step fails" if at < undisturbed.device.runs:
                yield run(scenario.with_faults(BadStep(at + 1)))
            case "fails for good" if at < len(leader.prompt) + ANSWER - 1:
                yield run(scenario.with_faults(Poison(leader.id, at)))


def steps_alone(prompts: Prompts) -> int:
    """Return how many steps the prompts take if they run one after another and share nothing."""
    return sum(-(-len(prompt) // STEP_TOKENS) + ANSWER - 1 for prompt in prompts)


def least_computed(prompts: Prompts) -> int:
    """Return how many prompt tokens are computed if each shared prefix is computed once.

    The last token of a repeated prompt is computed again, because the first output token is drawn from its state.
    """
    beginnings = {prompt[:end] for prompt in prompts for end in range(1, len(prompt) + 1)}
    return len(beginnings) + len(prompts) - len(set(prompts))


def check_every_point(strike: Strike, prompts: Prompts, world: World) -> None:
    """Check that every request that was not struck is answered in full.

    With a strike, all requests together may take no more steps than if they ran one after another, and may compute at
    most one leader's prompt more than without it.
    """
    scenario = world.scenario(prompts)
    undisturbed = run(scenario)
    for group in run_with_strikes(strike, scenario, undisturbed):
        survivors = group.client.exchanges[-1:] if strike == "all given up" else group.client.exchanges[1:]
        assert [each.tokens for each in survivors] == [each.oracle for each in survivors]
        assert group.device.runs <= steps_alone(prompts)
        if world.slots > 2 * len(prompts):
            assert group.computed <= undisturbed.computed + len(prompts[0])


STRIKES: tuple[Strike, ...] = (
    "aborted", "retracted", "all retracted", "step fails", "fails for good", "all given up",
)  # fmt: skip
GROUPS = {"choices": CHOICES, "a stem": STEMMED, "choices of two": CHOICES_OF_TWO}


@pytest.mark.parametrize("world", [WIDE, PAGED, NARROW], ids=["wide", "paged", "narrow"])
@pytest.mark.parametrize("prompts", GROUPS.values(), ids=GROUPS)
def test_a_shared_prefix_is_computed_once(prompts: Prompts, world: World) -> None:
    assert run(world.scenario(prompts)).computed == least_computed(prompts)


@pytest.mark.parametrize("world", [WIDE, PAGED], ids=["wide", "paged"])
def test_the_same_prompt_is_computed_once_whenever_it_comes(world: World) -> None:
    scenario = world.scenario((STEM,) * 2)
    first, second = scenario.asks
    for at in range(run(scenario).points or 0):
        group = run(replace(scenario, asks=(first, replace(second, at=float(at)))))
        assert group.computed == len(STEM) + 1, f"it came at {at}"


@pytest.mark.parametrize("strike", STRIKES)
@pytest.mark.parametrize(
    ("prompts", "world"),
    [(CHOICES, WIDE), (STEMMED, PAGED), (CHOICES_OF_TWO, NARROW)],
    ids=["choices", "a stem and pages", "choices of two in few slots"],
)
def test_the_leader_is_struck_at_every_point(strike: Strike, prompts: Prompts, world: World) -> None:
    check_every_point(strike, prompts, world)


@pytest.mark.soak
@pytest.mark.parametrize("strike", STRIKES)
@pytest.mark.parametrize("prompts", GROUPS.values(), ids=GROUPS)
def test_the_leader_is_struck_at_every_point_of_other_schedules(strike: Strike, prompts: Prompts) -> None:
    for world, schedule in product((WIDE, PAGED, NARROW), range(2, 5)):
        check_every_point(strike, prompts, replace(world, schedule=schedule))


@pytest.mark.parametrize("world", [replace(PAGED, strategy=Strategy.NO_BUFFER), WIDE], ids=["no slots", "too many"])
def test_no_request_waits_for_a_state_that_will_not_come(world: World) -> None:
    """Other requests end before the leader's long answer does, even if it gets too few checkpoint slots for them."""
    parting = [(*STEM[:at], 50, 51) for at in range(6, 24, 3)]
    scenario = world.scenario((STEM, *parting))
    leader, *others = scenario.asks
    limits = replace(scenario.limits, step_tokens=32, max_running=8)
    group = Group(replace(scenario, limits=limits, asks=(replace(leader, max_tokens=30), *others)))
    group.run()
    assert group.ended_before == len(others)
