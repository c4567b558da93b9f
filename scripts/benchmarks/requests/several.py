"""One to several engines with a router: what one more brings, and what its process and the router's cost.

The engines' device is pretended: the hash model (`models/hash_definition.py`) waits as long as a step would take. So
the figures show processes, HTTP and the router, on a machine with fewer cores than that many models need.
"""

import argparse
import asyncio
import json
import os
import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import aiohttp
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE

from scripts.benchmarks.common.contenders import Workbench
from scripts.benchmarks.common.figures import Spread, cpu_name
from scripts.benchmarks.common.server import Served
from scripts.benchmarks.requests.routed import Router, draw, stream

VOCABULARY = 256


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--most", type=int, default=4, help="engines")
    parser.add_argument("--rows", type=int, default=16, help="streams at once, of each engine")
    parser.add_argument("--step", type=float, default=20.0, help="milliseconds of the pretended device")
    parser.add_argument("--tokens", type=int, default=64, help="of each stream")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt, all different")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")


def run(options: argparse.Namespace, workbench: Workbench) -> None:
    print(f"{cpu_name()}, {os.cpu_count()} cores, steps of {options.step:.0f} ms, {options.rows} streams an engine")
    folder = pretended(workbench.folder / "pretended", options.step)
    flags = ["--max-running", str(options.rows), "--speculation", "off", "--log-level", "warning"]
    with ExitStack() as stack:
        engines = [
            stack.enter_context(Served(folder, 1, flags, workbench.log(f"engine {number}")))
            for number in range(options.most)
        ]
        routers = [
            stack.enter_context(Router([each.url for each in engines[: 1 + number]], workbench.log(f"router {number}")))
            for number in range(options.most)
        ]
        found = [Growth() for _ in routers]
        for number in range((options.rounds or 3) + 1):  # The first round warms up.
            for growth, router, used in zip(found, routers, range(1, 1 + options.most), strict=True):
                measured = asyncio.run(measure(router, engines[:used], options))
                if number:
                    growth.add(measured)
    one = median(found[0].tokens)
    print("engines | tokens/s | an engine, of one alone | first token, ms | router's share of a core | an engine's")
    for used, growth in enumerate(found, 1):
        share = Spread.of([tokens / (one * used) for tokens in growth.tokens])
        times = f"{median(growth.first):.0f} | {median(growth.router):.1%} | {median(growth.engine):.1%}"
        print(f"{used} | {median(growth.tokens):.0f} | {share} | {times}")


def pretended(folder: Path, step: float) -> Path:
    """Write a checkpoint whose model computes nothing and takes so many milliseconds for each step."""
    folder.mkdir(exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    Tokenizer(BPE(vocab={letter: id for id, letter in enumerate(letters)}, merges=[])).save(
        str(folder / "tokenizer.json")
    )
    sizes = {"vocab_size": VOCABULARY, "chunk_size": 8, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps({"model_type": "hash", "delay_ms": [step, step]} | sizes))
    return folder


@dataclass
class Measured:
    """The work of some engines in a time."""

    tokens: float  # a second
    first: float  # milliseconds to the first token, the median
    router: float  # share of a core
    engine: float  # share of a core, of each engine


@dataclass
class Growth:
    """The measurements with one number of engines."""

    tokens: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    router: list[float] = field(default_factory=list)
    engine: list[float] = field(default_factory=list)

    def add(self, measured: Measured) -> None:
        self.tokens.append(measured.tokens)
        self.first.append(measured.first)
        self.router.append(measured.router)
        self.engine.append(measured.engine)


async def measure(router: Router, engines: Sequence[Served], options: argparse.Namespace) -> Measured:
    """Keep all rows of the engines busy for some seconds."""
    firsts, tokens, until = list[float](), 0, time.perf_counter() + options.seconds

    async def ask() -> None:
        nonlocal tokens
        await asyncio.sleep(random.uniform(0, options.tokens * options.step / 1000))  # so that rows do not end together
        while time.perf_counter() < until:
            count, first = await stream(http, router.url, draw(options.prompt), options.tokens)
            tokens += count
            firsts.append(first)

    before, began = (router.seconds, seconds_of(engines)), time.perf_counter()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        await asyncio.gather(*(ask() for _ in range(options.rows * len(engines))))
    wall = time.perf_counter() - began
    used = router.seconds - before[0], seconds_of(engines) - before[1]
    return Measured(
        tokens / wall, 1000 * sorted(firsts)[len(firsts) // 2], used[0] / wall, used[1] / wall / len(engines)
    )


def seconds_of(engines: Sequence[Served]) -> float:
    """Return the processor seconds of all threads of these engines so far."""
    ticks = 0
    for engine in engines:
        fields = Path(f"/proc/{engine.process}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
