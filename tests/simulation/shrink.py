"""Reduction of a failing scenario: fewer requests, fewer faults, smaller pools, fewer deliveries."""

import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace

from baton.actors.scheduler.strategy import Strategy
from tests.simulation.driver import Simulation
from tests.simulation.scenario import Ask, BadStep, Crash, Fault, Scenario
from tests.simulation.talks import Talk, Turn

SCHEDULES = 3  # schedules tried for each simpler scenario
MAX_RUNS = 1000
LAST_SCHEDULES = 40  # schedules tried for the smallest scenario, to find the shortest failure


@dataclass(frozen=True)
class Failure:
    """The failure of a scenario: which error, where, and after how many deliveries."""

    kind: str  # the type of the error
    where: str  # the file and function that raised the error
    message: str
    deliveries: int  # number of messages delivered before the error

    def like(self, other: "Failure") -> bool:
        """Return whether both failures are the same type of error, raised in the same function."""
        return (self.kind, self.where) == (other.kind, other.where)


def failure(scenario: Scenario) -> Failure | None:
    """Run a scenario and return its failure, or None if it passes."""
    simulation = Simulation(scenario)
    try:
        simulation.run()
    except Exception as error:
        return failure_of(error, simulation.delivered)
    return None


def failure_of(error: Exception, deliveries: int) -> Failure:
    """Return the failure that an error of a simulation shows. deliveries: number of messages delivered before it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{frame.filename.rsplit('/', 1)[-1]}:{frame.name}"
    return Failure(type(error).__name__, where, str(error), deliveries)


def shrink(scenario: Scenario) -> tuple[Scenario, Failure]:
    """Return the smallest scenario found that fails in the same way as `scenario`, and its failure."""
    found = failure(scenario)
    if found is None:
        raise ValueError("this scenario passes")
    candidates, passed, runs = list(simpler(scenario)), 0, 0
    while passed < len(candidates) and runs < MAX_RUNS:
        at = runs % len(candidates)
        failing = fails_like(candidates[at], found, SCHEDULES)
        runs, passed = runs + 1, passed + 1
        if failing is not None:
            scenario, passed = failing, 0
            candidates = list(simpler(scenario))
    tried = [replace(scenario, schedule=scenario.schedule + more) for more in range(LAST_SCHEDULES)]
    failures = [(other, how) for other in tried if (how := failure(other)) is not None and how.like(found)]
    return min(failures, key=lambda pair: pair[1].deliveries)


def fails_like(scenario: Scenario, found: Failure, schedules: int) -> Scenario | None:
    """Return the scenario with a schedule under which it fails like `found`, or None if no tried schedule does."""
    for more in range(schedules):
        tried = replace(scenario, schedule=scenario.schedule + more)
        how = failure(tried)
        if how is not None and how.like(found):
            return tried
    return None


def simpler(scenario: Scenario) -> Iterator[Scenario]:
    """Yield simpler scenarios that may still fail, those with the largest cuts first."""
    asks, limits = scenario.asks, scenario.limits
    half = len(asks) // 2
    if half:
        yield replace(scenario, asks=asks[:half])
        yield replace(scenario, asks=asks[half:])
    for ask in asks[::-1] if len(asks) > 1 else ():
        yield scenario.without(ask=ask)
    yield from with_fewer_talks(scenario)
    for index, fault in enumerate(scenario.faults):
        yield scenario.without(fault=fault)
        for other in earlier(fault):
            yield replace(scenario, faults=(*scenario.faults[:index], other, *scenario.faults[index + 1 :]))
    plain = {
        "codec": False,
        "lazy": None,
        "step_time": 0.0,
        "max_tree_tokens": 1 << 22,
        "disk_time": 0.0,
        "hand_over": False,
    }
    for name, value in plain.items():
        if getattr(scenario, name) != value:
            yield replace(scenario, **{name: value})
    simple = {"max_running": 1, "track_interval": 0, "depth": 1, "strategy": Strategy.NO_BUFFER, "max_queue": 100}
    for name, value in simple.items():
        if getattr(limits, name) != value:
            yield replace(scenario, limits=replace(limits, **{name: value}))
    for number in {1, scenario.slots // 2, scenario.slots - 1} - {0}:
        if number < scenario.slots:
            yield replace(scenario, slots=number)
    for index, ask in enumerate(asks):
        for other in simpler_asks(ask):
            yield replace(scenario, asks=(*asks[:index], other, *asks[index + 1 :]))
    for index, talk in enumerate(scenario.talks):
        for simple in simpler_talks(talk):
            yield replace(scenario, talks=(*scenario.talks[:index], simple, *scenario.talks[index + 1 :]))


def with_fewer_talks(scenario: Scenario) -> Iterator[Scenario]:
    talks = scenario.talks
    half = len(talks) // 2
    for some in (talks[:half], talks[half:]) if half else ():
        yield replace(scenario, talks=some)
    for index in range(len(talks)):
        yield replace(scenario, talks=(*talks[:index], *talks[index + 1 :]))


def earlier(fault: Fault) -> Iterator[Fault]:
    """Yield the same fault at earlier points: what happened before it may not be needed for the failure."""
    match fault:
        case Crash(at=at):
            yield from (replace(fault, at=sooner) for sooner in sorted({1, at // 2, at - 1}) if 0 < sooner < at)
        case BadStep(run):
            yield from (BadStep(sooner) for sooner in sorted({1, run // 2, run - 1}) if 0 < sooner < run)


def simpler_asks(ask: Ask) -> Iterator[Ask]:
    plain = {
        "stop_ids": (),
        "stop_piece": None,
        "keep_stop": False,
        "ends": (),
        "priority": 0,
        "salt": "",
        "seed": None,
        "continues": None,
        "reuses": False,
        "leave": None,
        "logprobs": False,
        "prompt_logprobs_from": None,
        "pooled": None,
        "grammar": None,
        "min_tokens": 0,
    }
    for name, value in plain.items():
        if getattr(ask, name) != value:
            yield replace(ask, **{name: value})
    for number in {1, ask.max_tokens // 2, ask.max_tokens - 1} - {0}:
        if number < ask.max_tokens:
            yield replace(ask, max_tokens=number)
    for number in {1, len(ask.prompt) // 2, len(ask.prompt) - 1} - {0}:
        if number < len(ask.prompt):
            yield replace(ask, prompt=ask.prompt[:number])


def simpler_talks(talk: Talk) -> Iterator[Talk]:
    """Yield simpler versions of a session: fewer turns and commands, no delays, simpler requests."""
    for index, command in enumerate(talk.commands):
        yield replace(talk, commands=(*talk.commands[:index], *talk.commands[index + 1 :]))
        if command.after:
            at_once = replace(command, after=0.0)
            yield replace(talk, commands=(*talk.commands[:index], at_once, *talk.commands[index + 1 :]))
        for turns in fewer(command.turns):
            fork = replace(command, turns=turns)
            yield replace(talk, commands=(*talk.commands[:index], fork, *talk.commands[index + 1 :]))
    for turns in fewer(talk.turns):
        yield replace(talk, turns=turns)
    for index, turn in enumerate(talk.turns):
        for other in simpler_turns(turn):
            yield replace(talk, turns=(*talk.turns[:index], other, *talk.turns[index + 1 :]))


def fewer(turns: tuple[Turn, ...]) -> Iterator[tuple[Turn, ...]]:
    for index in reversed(range(len(turns))):
        yield (*turns[:index], *turns[index + 1 :])


def simpler_turns(turn: Turn) -> Iterator[Turn]:
    if turn.back is not None:
        yield Turn(turn.ask)
    if turn.ask.at:
        yield replace(turn, ask=replace(turn.ask, at=0.0))
    for ask in simpler_asks(turn.ask):
        yield replace(turn, ask=ask)
