"""The peers: lists and installs them, and checks that all engines draw the same greedy tokens in float32."""

import argparse
import asyncio
import random

import aiohttp

from scripts.benchmarks.common.contenders import Entry, Workbench
from scripts.benchmarks.common.server import Served
from scripts.benchmarks.peers import environments

IN_FLOAT32 = ("transformers:float32", "llama.cpp:f32", "openvino:f32")

PROMPTS, PROMPT_TOKENS, TOKENS = 4, 48, 32


def add_options(parser: argparse.ArgumentParser) -> None:
    peers = list(environments.RECIPES)
    parser.add_argument("--install", nargs="*", choices=peers, metavar="PEER", help=f"of {', '.join(peers)}; or all")
    parser.add_argument("--check", action="store_true", help="compare greedy tokens in float32")


def run(options: argparse.Namespace, workbench: Workbench) -> int:
    if options.install is not None:
        environments.install(options.install or list(environments.RECIPES))
    environments.show()
    return check(workbench) if options.check else 0


def check(workbench: Workbench) -> int:
    """Print how many leading tokens of each peer's answers equal Baton's. Return 1 if any token differs, else 0."""
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
        print(f"{entry.name:<24} the first {same} of {TOKENS} tokens equal Baton's", flush=True)
        code = code or int(min(same) < TOKENS)
    return code


def agreed(theirs: list[int], ours: list[int]) -> int:
    """Return the number of equal leading tokens."""
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
