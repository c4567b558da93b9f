"""Snapshots of engines with many cached states, as a router takes them in."""

import asyncio
import time

import pytest

from baton.api.events.frames import CachedDigest
from baton.api.routing.engines import Fleet
from tests.api.routing.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio
INTERVAL_S = 0.001


@pytest.mark.parametrize(
    ("count", "most_s"), [(20_000, 2.0), pytest.param(500_000, 15.0, marks=pytest.mark.soak)], ids=["short", "long"]
)
async def test_a_router_takes_a_large_snapshot(count: int, most_s: float) -> None:
    engine = FakeEngine("one", [CachedDigest(f"{number:016x}", number, "host") for number in range(count)])
    fleet, longest, loop = Fleet({}), 0.0, asyncio.get_running_loop()
    async with engine.server:
        began = time.monotonic()
        view = fleet.add(engine.url)
        async with asyncio.timeout(60):
            while view.phase == "lost":
                before = loop.time()
                await asyncio.sleep(INTERVAL_S)
                longest = max(longest, loop.time() - before)
        took = time.monotonic() - began
        assert fleet.index.count(view.number) == count and set(fleet.index.engines(count - 1)) == {view.number}
        began = time.monotonic()
        fleet.lose(view, "the test ends")
        print(f"{count} states: {took:.2f} s, the loop stood still for {longest:.2f} s; {lost_after(began)}")
        assert took < most_s
        await fleet.close()


def lost_after(began: float) -> str:
    return f"forgotten in {time.monotonic() - began:.2f} s"
