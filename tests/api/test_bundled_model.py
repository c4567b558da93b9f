"""The bundled model in a server: the same tokens in a session, in its fork and uncached, with and without overlap."""

import sys

import aiohttp
import pytest

from scripts.evaluating.asking import Client, Outcome, examine
from tests.api.server_process import SERVE, ServerProcess

pytestmark = pytest.mark.anyio
TASKS = ("recall", "sums", "tool calls")
TURNS, SAMPLES, AT_ONCE = 6, 3, 4
MOST_AFTER_START_MIB = 600e6 / 2**20


async def examined(*options: str) -> list[Outcome]:
    with ServerProcess([*SERVE, *options]) as server:
        async with aiohttp.ClientSession() as session:
            client = Client(session, server.url)
            return [
                outcome
                for task in TASKS
                for outcome in await examine(client, task, TURNS, SAMPLES, seed=3, at_once=AT_ONCE)
            ]


async def test_tokens_depend_neither_on_what_is_cached_nor_on_overlap() -> None:
    overlapped, alone = await examined(), await examined("--no-overlap")
    assert len(overlapped) == len(TASKS) * SAMPLES
    assert all(outcome.same_cold and outcome.same_forked for outcome in overlapped + alone)
    assert [outcome.session.ids for outcome in overlapped] == [outcome.session.ids for outcome in alone]
    assert all(outcome.session.ids for outcome in overlapped)
    assert all(outcome.session.cached > 0 for outcome in overlapped)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_server_takes_little_memory_before_it_is_used() -> None:
    """The pools are pages of zeros until they are used; the rest is mostly torch."""
    with ServerProcess() as server:
        started = server.resident_mib()
        status, _ = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})
        answered = server.resident_mib()
        print(f"{started:.0f} MiB after the start, {answered:.0f} after an answer")
        assert status == 200
        assert started < MOST_AFTER_START_MIB
        assert answered < MOST_AFTER_START_MIB
