"""The bundled model in a server: the same tokens in a session, in its fork and uncached, with and without overlap."""

import aiohttp
import pytest

from scripts.evaluating.asking import Client, Outcome, examine
from tests.api.server_process import SERVE, ServerProcess

pytestmark = pytest.mark.anyio
TASKS = ("recall", "sums", "tool calls")
TURNS, SAMPLES, AT_ONCE = 6, 3, 4


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
