"""One workload without limits, and then with each size and policy, each in a process of its own."""

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

STATES_OF_EACH = 8  # More than a request ever keeps.


@dataclass(frozen=True)
class Job:
    """What is played, whatever the policy and the slots.

    host: how many copies host memory holds, as a multiple of the states that wait to be used.
    """

    workload: Workload
    requests: int
    seed: int
    host: float = 0.0


@dataclass(frozen=True)
class Unlimited:
    """Without limits. states: that wait to be used, on average; running: requests that run, likewise.

    copies: how many host memory holds. slots, bounds: for each size, how many slots it is, and the share of tokens that
    nobody can exceed with them.
    """

    outcome: Outcome
    states: float
    running: float
    copies: int
    slots: list[int]
    bounds: list[float]


@dataclass(frozen=True)
class Comparison:
    """limited: by size and then by policy, under way."""

    unlimited: Unlimited
    limited: list[list[asyncio.Future[Outcome]]]


async def compare(pool: Executor, job: Job, sizes: Sequence[float], policies: Sequence[str]) -> Comparison:
    """Returns when it is known how many slots the sizes are."""
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
