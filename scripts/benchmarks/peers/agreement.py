"""That all compute the same: greedy tokens in float32, from the same weights."""

import argparse
import asyncio
import random

import aiohttp

from scripts.benchmarks.contenders import Entry, Workbench
from scripts.benchmarks.server import Served

IN_FLOAT32 = ("transformers:float32", "llama.cpp:f32", "openvino:f32")

PROMPTS, PROMPT_TOKENS, TOKENS = 4, 48, 32


def run(options: argparse.Namespace, workbench: Workbench) -> int:
    """How many tokens of each contender are Baton's. 1 if one of them has fewer than all."""
    config = workbench.config | {"torch_dtype": "float32"}
    bench = Workbench(config, workbench.folder, workbench.threads, PROMPTS)
    rng = random.Random(1)
    prompts = [[rng.randrange(config["vocab_size"]) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]
    expected = baton(bench, prompts)
    code = 0
    for entry in map(Entry.parse, IN_FLOAT32):
        if reason := bench.missing(entry):
            print(reason)
            continue
        with bench.peer(entry) as peer:
            found = peer.generate(prompts, TOKENS).tokens
        same = [agreed(theirs, ours) for theirs, ours in zip(found, expected, strict=True)]
        print(f"{entry.name:<24} the first {same} of {TOKENS} tokens as Baton's", flush=True)
        code = code or int(min(same) < TOKENS)
    return code


def agreed(theirs: list[int], ours: list[int]) -> int:
    """How many tokens from the first on are the same."""
    return next((i for i, (a, b) in enumerate(zip(theirs, ours, strict=True)) if a != b), len(ours))


def baton(bench: Workbench, prompts: list[list[int]]) -> list[list[int]]:
    with bench.serve(Entry.parse("baton")) as served:
        return asyncio.run(generate(served, prompts))


async def generate(served: Served, prompts: list[list[int]]) -> list[list[int]]:
    sampling = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompts, "sampling_params": sampling}
    async with (
        aiohttp.ClientSession(served.url) as http,
        http.post("/generate", json=body, raise_for_status=True) as answer,
    ):
        return [one["output_ids"] for one in await answer.json()]
