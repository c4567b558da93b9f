"""The cost of a group of requests with a common beginning, over HTTP: tokens and time compared to one request."""

import asyncio
import random
import re
import statistics
import string
from collections.abc import Sequence

import aiohttp
import pytest

from tests.api.server_process import ServerProcess

COMMON, SUFFIX = 2000, 20
MOST = 1.15
ROUNDS = 25


class Asker:
    """A client that sends random texts, which the cache cannot know. Each letter is one token."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._rng = random.Random(5)

    def text(self, length: int) -> str:
        return "".join(self._rng.choices(string.ascii_lowercase, k=length))

    def with_common_beginning(self) -> list[str]:
        beginning = self.text(COMMON)
        return [beginning + self.text(SUFFIX) for _ in range(4)]

    async def seconds(self, prompts: Sequence[str], max_tokens: int = 1, n: int = 1) -> float:
        """Send all prompts at once, and return the seconds until the last answer."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.gather(*(self._ask(prompt, max_tokens, n) for prompt in prompts))
        return loop.time() - began

    async def computed(self, prompts: Sequence[str], n: int = 1) -> int:
        """Send all prompts at once, and return how many prompt tokens were not cached."""
        before = await self._computed()
        await self.seconds(prompts, n=n)
        return await self._computed() - before

    async def _ask(self, prompt: str, max_tokens: int, n: int) -> None:
        body = {"prompt": prompt, "max_tokens": max_tokens, "n": n, "temperature": 0, "ignore_eos": True}
        async with self._session.post("/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            assert len((await answer.json())["choices"]) == n

    async def _computed(self) -> int:
        async with self._session.get("/metrics") as answer:
            metrics = await answer.text()
        queries, hits = (
            re.search(rf"^\S+:prefix_cache_{name}_total(?:{{.*}})? (\S+)$", metrics, re.MULTILINE)
            for name in ("queries", "hits")
        )
        assert queries is not None and hits is not None
        return int(float(queries[1]) - float(hits[1]))


def test_a_group_computes_its_common_beginning_once() -> None:
    async def scenario(url: str) -> None:
        async with aiohttp.ClientSession(url) as session:
            asker = Asker(session)
            one = await asker.computed([asker.text(COMMON)])
            assert one == COMMON
            assert await asker.computed([asker.text(COMMON)], n=4) <= MOST * one
            assert await asker.computed(asker.with_common_beginning()) <= MOST * (one + 4 * SUFFIX)
            short = asker.text(40)
            assert await asker.computed([short]) == 40
            assert await asker.computed([short]) <= 2

    with ServerProcess() as server:
        asyncio.run(scenario(server.url))


@pytest.mark.soak
@pytest.mark.parametrize("max_tokens", [1, 16])
def test_a_group_takes_hardly_longer_than_one(max_tokens: int) -> None:
    """A group takes hardly longer than one request, except for the measured extra time of decoding four rows."""

    async def scenario(url: str) -> None:
        async with aiohttp.ClientSession(url) as session:
            asker = Asker(session)
            choices, common = [], []
            for _ in range(ROUNDS + 1):
                known = asker.text(COMMON)
                one = await asker.seconds([known], max_tokens)
                longer = await asker.seconds([asker.text(COMMON + 4 * SUFFIX)], max_tokens)
                four = await asker.seconds([asker.text(COMMON)], max_tokens, n=4)
                decode = 0.0
                if max_tokens > 1:
                    decode = await asker.seconds([known], max_tokens, n=4) - await asker.seconds([known], max_tokens)
                choices.append((four / one, four / (one + decode)))
                at_once = await asker.seconds(asker.with_common_beginning(), max_tokens)
                common.append((at_once / longer, at_once / (longer + decode)))
            for name, ratios in (("n=4", choices[1:]), ("four at once", common[1:])):
                plain, fair = zip(*ratios, strict=True)
                print(f"{name}, {max_tokens} tokens each: {shown(plain)} of one; {shown(fair)} with its decoding")
                assert statistics.median(fair) <= MOST, name

    with ServerProcess() as server:
        asyncio.run(scenario(server.url))


def shown(ratios: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} (half of them {low:.3f} to {high:.3f})"
