"""Everything at once: fuzzed requests, bad connections, kills, two keys with sessions, and a measured client."""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.api.hash_traffic import wait_home
from tests.fuzz.server import make_hash_model
from tests.reliability.figures import Figures, quantile
from tests.reliability.hostile import hostility
from tests.reliability.latency import Latency, shown
from tests.reliability.lives import TENANTS, Lives
from tests.reliability.ordinary import chat
from tests.reliability.tenants import Tenant

pytestmark = pytest.mark.anyio

CHATS, FUZZERS, SLOW = 16, 2, 40
COLD_S = 3.0
OWN_DESCRIPTORS = 4  # for a file or a connection of the server itself; too few for one a client
LIMITS = {"headers", "idle", "unread", "left", "websocket", "bytes"}
SOAK_MINUTES = float(os.environ.get("BATON_RELIABILITY_MINUTES") or 20)


@dataclass(frozen=True)
class Plan:
    """The phases of a run, and the conditions that it must meet."""

    alone: float  # seconds in which only the well-behaved client runs
    calm: float  # seconds in which ordinary clients run too
    lives: tuple[float, ...]  # seconds that each life with hostile clients lasts; the last one is the longest
    warm: float  # from this age (seconds) on, a life's memory may grow by at most growth_mib
    growth_mib: float
    part: float  # quantile of the well-behaved client's latencies that is compared
    slower: float  # a hostile latency may be this many times the calm one
    more_s: float  # plus this many seconds


# A short run only shows that no client is blocked. Its memory still grows towards the limits on bytes in flight.
SHORT = Plan(2, 5, (6, 9), warm=COLD_S, growth_mib=120, part=0.5, slower=1, more_s=0.25)


def long_plan(minutes: float) -> Plan:
    """Return a plan with a kill about every three minutes, at least two kills, and a long last life."""
    seconds = minutes * 60
    count = max(2, round(seconds * 0.6 / 180))
    lives = (*[seconds * 0.6 / count] * count, seconds * 0.3)
    warm = min(120.0, lives[-1] / 2)
    return Plan(seconds * 0.02, seconds * 0.08, lives, warm, growth_mib=24, part=0.99, slower=2.5, more_s=0.01)


@pytest.mark.parametrize(
    ("plan", "seed"),
    [(SHORT, 1), pytest.param(long_plan(SOAK_MINUTES), None, marks=pytest.mark.soak)],
    ids=["short", "long"],
)
async def test_all_at_once(tmp_path: Path, plan: Plan, seed: int | None) -> None:
    """BATON_FIRST_SEED sets the seed of a long run, to repeat it."""
    seed = seed or int(os.environ.get("BATON_FIRST_SEED") or int.from_bytes(os.urandom(4)))
    figures = Figures()
    lives = Lives(make_hash_model(tmp_path), tmp_path, figures)
    await lives.start()
    at_start = lives.server.descriptors()
    latency = Latency(lives, figures)
    try:
        async with latency.measured(tmp_path, TENANTS[0]):
            await run(plan, seed, lives, latency)
        await asyncio.to_thread(wait_home, lives.server)
        assert await lives.descriptors_at_rest() <= at_start + OWN_DESCRIPTORS
        await lives.end()
    finally:
        lives.server.kill()
        seen = latency.judge()
        print(f"seed {seed}, load average {os.getloadavg()[1]:.1f}\n{figures}\n{shown(seen)}")

    assert figures.wrong == [], "\n\n".join(figures.wrong)
    assert figures.done["kills"] == len(plan.lives) - 1 and figures.done["turns found again"] > 0
    assert set(figures.ended) >= LIMITS, "not every limit was reached"
    first, last = figures.grown(lives.number, plan.warm)
    assert last.resident_mib - first.resident_mib < plan.growth_mib
    calm, hostile = (quantile(seen[window], plan.part) for window in ("calm", "hostile"))
    assert hostile < plan.slower * calm + plan.more_s


async def run(plan: Plan, seed: int, lives: Lives, latency: Latency) -> None:
    latency.open("alone", time.monotonic() + 1)
    await asyncio.sleep(plan.alone + 1)
    ordinary = [lives.watch(), *(Tenant(lives, name, seed).live() for name in TENANTS)]
    async with meanwhile([*ordinary, *(chat(lives, seed + number) for number in range(CHATS))]):
        latency.open("calm", time.monotonic())
        await asyncio.sleep(plan.calm)
        async with meanwhile(hostility(lives, seed, FUZZERS, SLOW)):
            for number, seconds in enumerate(plan.lives):
                latency.open("after a kill", time.monotonic())
                if number:
                    await lives.kill()
                latency.open("hostile", time.monotonic() + (COLD_S if number else 0))
                await asyncio.sleep(seconds)


@contextlib.asynccontextmanager
async def meanwhile(clients: list[Awaitable[None]]) -> AsyncIterator[None]:
    """Run the clients while the block runs. An error of a client ends the block."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(client) for client in clients]
        yield
        for task in running:
            task.cancel()
