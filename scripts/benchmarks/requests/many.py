"""A router in front of 1,000 pretended engines: what following them, a streamed chunk and a request cost."""

import argparse
import asyncio
import json
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from urllib.request import urlopen

import aiohttp

from baton.api.connections.limits import raise_descriptor_limit
from scripts.benchmarks.common.contenders import Workbench
from scripts.benchmarks.common.figures import Spread, cpu_name
from scripts.benchmarks.common.server import ServerProcess
from scripts.benchmarks.requests.pretended_engines import address
from scripts.benchmarks.requests.routed import Relay, Router, complete, draw, stream

WAIT_S = 0.5


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engines", type=int, default=1000)
    parser.add_argument("--states", type=int, default=1000, help="cached states of each engine")
    parser.add_argument("--gap", type=float, default=20.0, help="milliseconds between two tokens of a stream")
    parser.add_argument("--rows", type=int, default=100, help="streams at once")
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--requests", type=int, default=1000, help="complete requests of one token, after one another")


def run(options: argparse.Namespace, workbench: Workbench) -> None:
    raise_descriptor_limit()
    print(f"{cpu_name()}, {os.cpu_count()} cores: {options.engines} engines with {options.states} states each")
    with ExitStack() as stack:
        engines = stack.enter_context(PretendedProcess(options, workbench.log("engines")))
        port = engines.url.rpartition(":")[2]
        urls = [f"http://{address(number)}:{port}" for number in range(options.engines)]
        router = stack.enter_context(Router(urls, workbench.log("router")))
        wait_found(router, options.engines)
        found = ManyCosts()
        for number in range((options.rounds or 3) + 1):  # The first round warms up.
            costs = asyncio.run(measure(router, options))
            if number:
                found.add(*costs)
        pages = int(Path(f"/proc/{router.process}/statm").read_text().split()[1])
        print(f"following the engines: {Spread.of(found.following)} % of a core, {pages * 4096 / 2**20:.0f} MiB")
        print(f"a streamed chunk, of {options.rows} streams: {Spread.of(found.chunk)} µs")
        print(f"a request, one at a time: {Spread.of(found.request)} µs")


class PretendedProcess(ServerProcess):
    """The process of the pretended engines."""

    def __init__(self, options: argparse.Namespace, log: Path) -> None:
        module = "scripts.benchmarks.requests.pretended_engines"
        flags = ["--states", str(options.states), "--gap", str(options.gap)]
        super().__init__([sys.executable, "-m", module, *flags], 1, log, "/ready")


@dataclass
class ManyCosts:
    """The processor time of a router, in each round."""

    following: list[float] = field(default_factory=list)  # percent of a core, without requests
    chunk: list[float] = field(default_factory=list)  # microseconds, the following and the request not counted
    request: list[float] = field(default_factory=list)

    def add(self, following: float, chunk: float, request: float) -> None:
        self.following.append(following)
        self.chunk.append(chunk)
        self.request.append(request)


def wait_found(router: Relay, count: int) -> None:
    """Wait until the router knows all engines."""
    while True:
        with urlopen(f"{router.url}/debug/engines") as answer:
            phases = [engine["phase"] for engine in json.load(answer)]
        if phases.count("ready") == count:
            return
        time.sleep(WAIT_S)


async def measure(router: Relay, options: argparse.Namespace) -> tuple[float, float, float]:
    """Return the costs of one round: percent of a core, and microseconds of a chunk and of a request."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        before, began = router.seconds, time.perf_counter()
        await asyncio.sleep(options.tokens * options.gap / 1000)
        following = (router.seconds - before) / (time.perf_counter() - began)

        before, began = router.seconds, time.perf_counter()
        streams = (stream(http, router.url, draw(16), options.tokens) for _ in range(options.rows))
        chunks = sum(count for count, _ in await asyncio.gather(*streams))
        streamed = router.seconds - before - following * (time.perf_counter() - began)

        before, began = router.seconds, time.perf_counter()
        for _ in range(options.requests):
            await complete(http, router.url, draw(16))
        answered = (router.seconds - before - following * (time.perf_counter() - began)) / options.requests
    return 100 * following, 1e6 * (streamed - options.rows * answered) / chunks, 1e6 * answered
