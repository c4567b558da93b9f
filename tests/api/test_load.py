"""A real hybrid model under load: 1,000 requests at concurrency 64, some aborted, some with clients that disconnect."""

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.api.server_process import SERVE, ServerProcess
from tests.models.oracle import Oracle

pytestmark = pytest.mark.anyio

REQUESTS, AT_ONCE = 500, 64
GROWTH_MIB = 32
POOLS = [
    "--state-slots",
    "24",
    "--kv-pages",
    "220",
    "--page-size",
    "8",
    "--max-running",
    "12",
    "--max-model-len",
    "300",
]


@pytest.fixture(scope="module")
def checkpoint(oracle: Oracle) -> Path:
    return oracle.checkpoint("nemotron_h")


class Traffic:
    """Greedy requests for a few prompts of random lengths, each sent many times, with counts of their outcomes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.prompts = [[self.random.randrange(256) for _ in range(self.random.randint(1, 120))] for _ in range(80)]
        self.fates: Counter[str] = Counter()

    async def run(self, url: str) -> None:
        gate = asyncio.Semaphore(AT_ONCE)
        async with aiohttp.ClientSession(url) as session, asyncio.TaskGroup() as tasks:
            for number in range(REQUESTS):
                tasks.create_task(self._one(session, gate, number))

    async def _one(self, session: aiohttp.ClientSession, gate: asyncio.Semaphore, number: int) -> None:
        async with gate:
            fate = self.random.choices(["finish", "leave", "abort"], [8, 1, 1])[0]
            tokens = self.random.randint(1, 40)
            body: dict[str, Any] = {
                "input_ids": self.random.choice(self.prompts),
                "rid": f"load{number}",
                "stream": fate != "finish",
                "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
            }
            async with session.post("/generate", json=body) as response:
                assert response.status == 200, await response.text()
                if fate == "finish":
                    answer = await response.json()
                    assert len(answer["output_ids"]) == tokens
                    assert answer["meta_info"]["finish_reason"]["type"] == "length"
                elif fate == "leave":
                    await response.content.readline()
                else:
                    await (await session.post("/abort_request", json={"rid": f"load{number}"})).read()
                    await response.read()
            self.fates[fate] += 1


async def test_everything_is_answered_and_everything_comes_home(checkpoint: Path) -> None:
    with ServerProcess([*SERVE, str(checkpoint), "--dtype", "float32", *POOLS]) as server:
        resident = []
        for seed in (1, 2):
            traffic = Traffic(seed)
            await traffic.run(server.url)
            assert traffic.fates.total() == REQUESTS and min(traffic.fates.values()) > 10
            await asyncio.to_thread(server.wait_until, lambda: is_home(server))
            resident.append(server.resident_mib())
        assert resident[1] - resident[0] < GROWTH_MIB
        info = server.get("/server_info")
        assert info["gauges"]["slots"]["quarantined"] == 0 and info["counters"]["prefix_cache_hits"] > 0
    assert server.log[-1]["event"] == "drained"
    assert not [line for line in server.log if line["level"] in ("error", "critical")]


def is_home(server: ServerProcess) -> bool:
    info = server.get("/server_info")
    slots, pages = info["gauges"]["slots"], info["gauges"]["pages"]
    home = slots["free"] + slots["cached"] == 24 and pages["free"] + pages["cached"] == 220
    return home and info["open_requests"] == 0 and info["audit"] == []
