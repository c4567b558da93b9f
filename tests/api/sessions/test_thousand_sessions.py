"""Far more sessions than slots, on a real hybrid model: every turn is right, and deleting all sessions frees all."""

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.api.hash_traffic import troubles, wait_home
from tests.api.server_process import SERVE, ServerProcess
from tests.models.oracle import Oracle

pytestmark = pytest.mark.anyio

SLOTS, PAGES, TURNS, AT_ONCE = 16, 220, 3, 16
POOLS = ["--state-slots", str(SLOTS), "--kv-pages", str(PAGES), "--page-size", "8", "--step-tokens", "96"]
POOLS += ["--host-memory", "8M"]
HOST_MEMORY, GROWTH_MIB = 8 << 20, 64
# transformers sums in another order, so a token whose logit is within TIE of the best one is accepted.
TIE = 1e-3


class Session:
    """A session with a copy of its log, token by token."""

    def __init__(self, http: aiohttp.ClientSession, id: str) -> None:
        self.path = f"/v1/sessions/{id}"
        self.log: list[int] = []
        self.sampled: list[int] = []  # indices in `log` of the tokens that the model sampled
        self.cached = 0  # prompt tokens that came from the cache
        self._http = http
        self._one_at_a_time = asyncio.Lock()

    async def turn(self, chance: random.Random) -> None:
        async with self._one_at_a_time:
            new = [chance.randrange(256) for _ in range(chance.randint(1, 24))]
            body = {"input_ids": new, "max_tokens": chance.randint(1, 12), "temperature": 0}
            answer = await post(self._http, f"{self.path}/turns", body)
            assert (answer["status"], answer["history"], answer["start"]) == ("completed", *[len(self.log)] * 2)
            self.log += new
            self.cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            self.sampled += range(len(self.log), len(self.log) + len(answer["output_ids"]))
            self.log += answer["output_ids"]
            assert answer["position"] == len(self.log)

    async def delete(self) -> None:
        async with self._http.delete(self.path) as response:
            assert response.status == 200, await response.text()

    def check(self, oracle: Oracle, path: Path) -> None:
        """Check that each sampled token is the most probable one for transformers, given the log before it."""
        logits = oracle.logits(path, self.log)
        for index in self.sampled:
            before = logits[index - 1]
            assert before[self.log[index]] > before.max() - TIE, (self.path, index, len(self.log))


@pytest.mark.parametrize("count", [64, pytest.param(1000, marks=pytest.mark.soak)])
async def test_every_turn_is_right_and_nothing_is_held_at_the_end(oracle: Oracle, count: int) -> None:
    path = oracle.checkpoint("nemotron_h")
    with ServerProcess([*SERVE, str(path), "--dtype", "float32", *POOLS]) as server:
        async with aiohttp.ClientSession(server.url) as http:
            resident = server.resident_mib()
            sessions = [Session(http, (await post(http, "/v1/sessions", {}))["id"]) for _ in range(count)]
            await take_turns(http, sessions)
            assert all(len(session.sampled) >= TURNS for session in sessions)
            assert sum(session.cached for session in sessions) > 0
            await asyncio.to_thread(wait_home, server)
            assert server.resident_mib() - resident < GROWTH_MIB
            for session in sessions:
                await asyncio.to_thread(session.check, oracle, path)
            await delete_all(http, sessions)
        await asyncio.to_thread(wait_home, server)
        check_nothing_is_held(server)
    assert troubles(server) == []


async def take_turns(http: aiohttp.ClientSession, sessions: list[Session]) -> None:
    """Run three turns of each session, in random order, AT_ONCE at a time; check the totals of slots and pages."""
    chance = random.Random(len(sessions))
    order = sessions * TURNS
    chance.shuffle(order)

    async def work() -> None:
        while order:
            await order.pop().turn(chance)
            assert await sizes(http) == (SLOTS, PAGES)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(AT_ONCE):
            tasks.create_task(work())


async def delete_all(http: aiohttp.ClientSession, sessions: list[Session]) -> None:
    for session in sessions:
        await session.delete()
    async with http.get("/v1/sessions") as response:
        assert (await response.json())["data"] == []


def check_nothing_is_held(server: ServerProcess) -> None:
    """Check that no loan and no pin is left, and that a flush frees every slot and page."""
    assert {slot["loans"] for slot in server.get("/debug/slots")} == {0}
    assert {node["pins"] for node in server.get("/debug/tree")} <= {0}
    assert server.post("/flush_cache", {})[0] == 200
    gauges = server.get("/server_info")["gauges"]
    assert Counter(gauges["slots"]) == Counter(free=SLOTS)
    assert (gauges["pages"]["free"], gauges["pages"]["used"]) == (PAGES, 0)


async def sizes(http: aiohttp.ClientSession) -> tuple[int, int]:
    """Return the total of the slot gauges, and the total of the page gauges."""
    async with http.get("/server_info") as response:
        gauges = (await response.json())["gauges"]
    return sum(gauges["slots"].values()), sum(gauges["pages"].values())


async def post(http: aiohttp.ClientSession, path: str, body: Any) -> Any:
    async with http.post(path, json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()
