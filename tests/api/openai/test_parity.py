"""Parity with transformers: the server's greedy tokens over HTTP, one request alone and many at once."""

import asyncio
import random

import aiohttp
import pytest

from tests.api.server_process import SERVE, ServerProcess
from tests.models.oracle import Oracle

pytestmark = pytest.mark.anyio

LENGTHS = [1, 2, 3, 5, 15, 16, 17, 31, 33, 40, 63, 64, 65, 90, 129, 140]
TOKENS = 10
SOAKED = ("bamba-groups", "nemotron_h", "mamba2-groups", "granitemoehybrid-rope", "kimi_linear-groups", "lfm2_moe")
WITHOUT_OVERLAP = ("mamba2-groups", "granitemoehybrid-rope", "falcon_h1-norm")


def prompts() -> list[list[int]]:
    rng = random.Random(6)
    return [[rng.randrange(256) for _ in range(length)] for length in LENGTHS]


async def ask(session: aiohttp.ClientSession, prompt: list[int]) -> list[int]:
    params = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    async with session.post("/generate", json={"input_ids": prompt, "sampling_params": params}) as response:
        assert response.status == 200, await response.text()
        tokens: list[int] = (await response.json())["output_ids"]
        return tokens


@pytest.mark.parametrize(
    "name",
    [
        *("falcon_h1-norm", "qwen3_5_moe"),
        *(pytest.param(name, marks=pytest.mark.soak) for name in SOAKED),
    ],
)
async def test_greedy_tokens(oracle: Oracle, name: str) -> None:
    path = oracle.checkpoint(name)
    expected = [oracle.greedy(path, prompt, TOKENS) for prompt in prompts()]
    options = ["--dtype", "float32", "--memory", "256M", "--max-model-len", "400", "--step-tokens", "96"]
    for overlap in ([], ["--no-overlap"]) if name in WITHOUT_OVERLAP else ([],):
        with ServerProcess([*SERVE, str(path), *options, *overlap]) as server:
            async with aiohttp.ClientSession(server.url) as session:
                alone = [await ask(session, prompt) for prompt in prompts()[::5]]
                assert alone == expected[::5]
                await session.post("/flush_cache")
                crowd = await asyncio.gather(*(ask(session, prompt) for prompt in prompts()))
                assert crowd == expected
