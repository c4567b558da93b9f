"""A real cluster that grows under load and shrinks after it, while every token of every answer is checked."""

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.api.cluster.test_cluster import ClusterProcess
from tests.api.hash_traffic import Traffic, make_checkpoint

pytestmark = [pytest.mark.anyio, pytest.mark.soak]
FILE = """
model = "model"
[options]
max_running = 4
drain_timeout = 3
[scaling]
queue = 0.05
up_after = 0.5
down_after = 0.5
[engines.engine]
min = 1
max = 3
"""
PATIENCE_S = 60


async def traffic_until(cluster: ClusterProcess, at_once: int, condition: Callable[[], bool]) -> Counter[str]:
    """Send requests until a condition holds. Return how they ended."""
    outcomes = Counter[str]()
    async with asyncio.timeout(PATIENCE_S):
        while not await asyncio.to_thread(condition):
            sent = Traffic(cluster.url, outcomes.total(), requests=4 * at_once, at_once=at_once, finish=1, stream=2)
            await sent.run()
            outcomes += sent.outcomes
    return outcomes


async def test_a_cluster_grows_and_shrinks_without_failing_a_request(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    make_checkpoint(tmp_path / "model", delay_ms=[5, 10])
    (tmp_path / "cluster.toml").write_text(FILE)
    with ClusterProcess(tmp_path) as cluster:
        cluster.wait_until(lambda: cluster.phases() == ["ready"])
        for _ in range(2):
            grown = await traffic_until(cluster, 64, lambda: cluster.phases() == ["ready"] * 3)
            shrunk = await traffic_until(cluster, 2, lambda: cluster.phases() == ["ready"])
            print(f"requests while growing and shrinking: {grown.total()}, {shrunk.total()}")
            assert grown.keys() == shrunk.keys() == {"length"}
