"""The number of requests that run concurrently in the same memory, for each state strategy."""

import asyncio
import random
from dataclasses import dataclass

import pytest
import torch

from baton.actors.runtime.sizing import size_pools
from baton.actors.scheduler.strategy import Strategy
from baton.models.loading.checkpoint import random_model
from tests.actors.ring import Ring, running
from tests.actors.test_ring import MAMBA2, VOCABULARY

SLOTS, TREE_SLOTS = 96, 72
CONVERSATIONS, TURNS = 32, 4


@dataclass
class Figures:
    fit: int
    peak: int
    hit_rate: float


async def converse(ring: Ring, seed: int) -> None:
    """Run one conversation, each turn of which continues the history so far."""
    rng = random.Random(seed)
    history = [rng.randrange(VOCABULARY) for _ in range(60)]
    for _ in range(TURNS):
        answer = await ring.ask(list(history), 12)
        history += answer.tokens + [rng.randrange(VOCABULARY) for _ in range(16)]


async def measure(strategy: Strategy) -> Figures:
    model = random_model(MAMBA2, torch.float32, torch.device("cpu"), seed=1)
    sizes = size_pools(model, 0, 1000, 1024, 16, slots=SLOTS, tree_slots=TREE_SLOTS, strategy=strategy)
    peak = 0
    async with running(model, SLOTS, max_running=sizes.max_running, step_tokens=256, strategy=strategy) as ring:
        scheduler = ring.relay.unit.scheduler
        act = scheduler.act

        def watched() -> None:
            nonlocal peak
            act()
            peak = max(peak, len(scheduler.state.rows))

        scheduler.act = watched  # type: ignore[method-assign]
        await asyncio.gather(*(converse(ring, seed) for seed in range(1, CONVERSATIONS + 1)))
        counters = ring.relay.counters()
    return Figures(sizes.max_running, peak, counters["prefix_cache_hits"] / counters["prefix_cache_queries"])


def test_just_in_time_runs_more_requests_in_the_same_memory(capsys: pytest.CaptureFixture[str]) -> None:
    extra = asyncio.run(measure(Strategy.EXTRA_BUFFER))
    just = asyncio.run(measure(Strategy.JUST_IN_TIME))
    with capsys.disabled():
        print(f"\n{SLOTS} slots, {TREE_SLOTS} for the tree: extra_buffer {extra}, just_in_time {just}")
    assert (extra.peak, just.peak) == (extra.fit, just.fit)
    assert just.peak >= 2.5 * extra.peak
    assert abs(just.hit_rate - extra.hit_rate) <= 0.02
    assert just.hit_rate > 0.5
