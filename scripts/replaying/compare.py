"""Play one workload without limits, then with each size and policy, each in its own process."""

import asyncio
import sys
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from scripts.replaying.bound import Past
from scripts.replaying.costs import Costs
from scripts.replaying.play import Outcome, make_ring, play
from scripts.replaying.policies import POLICIES
from scripts.replaying.workloads import Workload

STATES_OF_EACH = 8  # slots per request in the run without limits; no request keeps as many states


@dataclass(frozen=True)
class Job:
    """A workload that is replayed with every policy and every pool size."""

    workload: Workload
    requests: int
    seed: int
    host: float = 0.0  # copies in host memory, as a multiple of the states that wait to be used


@dataclass(frozen=True)
class Unlimited:
    """The run of a workload without limits, and the limits of the other runs, which follow from it."""

    outcome: Outcome
    states: float  # mean number of states that wait to be used
    running: float  # mean number of running requests
    copies: int  # number of copies that host memory holds
    slots: list[int]  # number of slots for each size
    bounds: list[float]  # for each size: upper bound of the share of tokens that can be reused


@dataclass(frozen=True)
class Comparison:
    """A finished run without limits, and runs with limits that are in progress."""

    unlimited: Unlimited
    limited: list[list[asyncio.Future[Outcome]]]  # outcomes by size, then by policy


async def compare(pool: Executor, job: Job, sizes: Sequence[float], policies: Sequence[str]) -> Comparison:
    """Play a job without limits, then start the runs with limits: their slots follow from the run without limits."""
    loop = asyncio.get_running_loop()
    unlimited = await loop.run_in_executor(pool, play_unlimited, job, sizes)
    limited = [
        [loop.run_in_executor(pool, play_limited, job, policy, slots, unlimited.copies) for policy in policies]
        for slots in unlimited.slots
    ]
    return Comparison(unlimited, limited)


def play_unlimited(job: Job, sizes: Sequence[float]) -> Unlimited:
    past = Past()
    slots = STATES_OF_EACH * max(job.requests, 64)
    ring = make_ring(POLICIES["worth"], slots, Costs(), block=job.workload.block, tree=sys.maxsize)
    outcome = play(job.workload, ring, job.requests, job.seed, past)
    states, running = past.frontiers(), outcome.running / outcome.seconds
    limited = [max(1, round(states * size + running)) for size in sizes]
    bounds = [past.bound(each) for each in limited]
    return Unlimited(outcome, states, running, round(states * job.host), limited, bounds)


def play_limited(job: Job, policy: str, slots: int, copies: int) -> Outcome:
    ring = make_ring(POLICIES[policy], slots, Costs(), block=job.workload.block, copies=copies)
    return play(job.workload, ring, job.requests, job.seed)
