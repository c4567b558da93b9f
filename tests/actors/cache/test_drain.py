"""The time that draining ten thousand sessions takes: in the cache only, and in a ring that writes files."""

import asyncio
import time
from pathlib import Path

import pytest

from baton.actors.cache.below.limits import TierLimits
from baton.actors.messages import Drain
from baton.models.hash import HashModel
from tests.actors.cache.test_costs import PLACES, Bench
from tests.actors.ring import running

SESSIONS, AT_ONCE = 10_000, 16
MOST_S, MOST_WITH_FILES_S = 10, 60


@pytest.mark.soak
@pytest.mark.alone
@pytest.mark.parametrize("place", PLACES)
def test_the_cache_alone(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    bench = Bench(SESSIONS, *PLACES[place](SESSIONS))
    began = time.process_time()
    bench.drain()
    seconds = time.process_time() - began
    with capsys.disabled():
        print(f"\n{SESSIONS} sessions {place}: {seconds:.2f} s of a processor")
    assert seconds < MOST_S


@pytest.mark.soak
@pytest.mark.alone
def test_to_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All sessions are in host memory when the drain begins, and no file has been written ahead."""
    tiers = TierLimits(host_bytes=1 << 33, disk_bytes=1 << 33, state_bytes=64, token_bytes=64)
    model = HashModel(vocab_size=61, chunk_size=8, max_position=1024)

    async def scenario() -> float:
        async with running(model, slots=64, pages=600, page_size=4, tiers=tiers, folder=tmp_path) as ring:  # type: ignore[arg-type]
            for first in range(0, SESSIONS, AT_ONCE):
                turns = range(first, first + AT_ONCE)
                for number in turns:
                    ring.name(f"s{number}", [])
                prompts = [[number % 61, number // 61 % 61, number // 3721, 1] for number in turns]
                await asyncio.gather(
                    *(ring.ask(prompt, 2, session=f"s{n}") for n, prompt in zip(turns, prompts, strict=True))
                )
            await ring.until(lambda: not ring.relay.unit.cache.accounts)
            began = time.monotonic()
            ring._send("scheduler", Drain())
            await asyncio.shield(ring.drained)
            ring._send = lambda to, message: None
            return time.monotonic() - began

    seconds = asyncio.run(scenario())
    with capsys.disabled():
        print(f"\n{SESSIONS} sessions to files: {seconds:.1f} s")
    assert len(list(tmp_path.iterdir())) == SESSIONS and seconds < MOST_WITH_FILES_S
