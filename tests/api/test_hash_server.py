"""The hash model in a real server: threads, HTTP, disconnects, aborts, delays, small pools; every token is checked."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.hash_traffic import Traffic, make_checkpoint, troubles, wait_home
from tests.api.server_process import SERVE, ServerProcess

pytestmark = pytest.mark.anyio

SLOTS = 12
SMALL = [
    "--state-slots", str(SLOTS), "--kv-pages", "160", "--page-size", "4", "--max-running", "8",
    "--step-tokens", "64", "--max-model-len", "200", "--track-interval", "16", "--poison-freed",
    "--host-memory", "1M",  # limits how many copies accumulate: each is tiny, with larger Python objects than content
]  # fmt: skip
GROWTH_MIB = 24


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("hash"), delay_ms=[0, 1])


@pytest.fixture(params=[[], ["--no-overlap"], ["--codec-check"]], ids=["overlap", "no-overlap", "codec"])
def server(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[ServerProcess]:
    with ServerProcess([*SERVE, str(checkpoint), *SMALL, *request.param]) as running:
        yield running
    assert running.log[-1]["event"] == "drained"
    assert troubles(running) == []


@pytest.mark.parametrize("requests", [200, pytest.param(10_000, marks=pytest.mark.soak)])
async def test_every_token_is_right_and_every_slot_comes_home(server: ServerProcess, requests: int) -> None:
    """Every token is right, every slot and page comes home, and a second run of the traffic takes no more memory."""
    resident = []
    for seed in range(2):
        traffic = Traffic(server.url, seed, requests)
        await traffic.run()
        assert traffic.outcomes["length"] > requests / 2 and traffic.outcomes["leave"] > 0
        assert traffic.cached > 0
        await asyncio.to_thread(wait_home, server)
        resident.append(server.resident_mib())
    assert resident[-1] - resident[0] < GROWTH_MIB


async def test_the_ledger_can_be_rebuilt_from_the_log(checkpoint: Path) -> None:
    with ServerProcess([*SERVE, str(checkpoint), *SMALL, "--log-level", "debug"]) as server:
        await Traffic(server.url, seed=11, requests=60).run()
        await asyncio.to_thread(wait_home, server)
        expected = server.get("/server_info")["gauges"]["slots"]
        shown = server.get("/debug/slots")
        mark = server.get("/server_info")["lease_moves"]
        server.wait_until(lambda: sum(line["event"] == "lease" for line in server.log) >= sum(mark.values()))
        moves = [line for line in server.log if line["event"] == "lease"]
    known = dict.fromkeys(range(SLOTS), ("free", "pool", 0))
    for move in moves:
        place, _, generation = known[move["slot"]]
        assert move["generation"] == generation + (place == "free")
        known[move["slot"]] = move["place"], move["holder"], move["generation"]
    rebuilt = Counter(place for place, _, _ in known.values())
    assert {place: rebuilt[place] for place in expected} == expected
    assert {entry["slot"]: (entry["place"], entry["holder"], entry["generation"]) for entry in shown} == known
