"""An engine with and without a router; several engines compared with one that has all their slots.

Prints the router's processor time for each streamed chunk and each request, the time to the first token through the
router divided by that without it, and how much of the prompts of agents was reused.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from scripts.benchmarks.common.contenders import Workbench
from scripts.benchmarks.common.figures import Spread, cpu_name
from scripts.benchmarks.common.server import Served, ServerProcess
from scripts.benchmarks.requests.agents import WORDS, with_chat

SHORT = {"temperature": 0, "ignore_eos": True}
VARIETY = 250  # the byte tokens that prompts are drawn from


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=16, help="streams at once")
    parser.add_argument("--tokens", type=int, default=400, help="of each stream")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompts whose first token is timed")
    parser.add_argument("--requests", type=int, default=100, help="complete requests of one token, one after another")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--slots", type=int, default=16, help="of each of the engines")
    parser.add_argument("--agents", type=int, default=48, help="agents whose turns alternate")
    parser.add_argument("--turns", type=int, default=8, help="of each agent")


def run(options: argparse.Namespace, workbench: Workbench) -> None:
    print(cpu_name())
    rounds, threads = options.rounds or 5, options.threads or workbench.threads
    vocabulary = workbench.config["vocab_size"]
    folder = with_chat(workbench.checkpoint, vocabulary) if options.model != "bundled" else workbench.checkpoint
    with ExitStack() as stack:

        def start(name: str, slots: int) -> Served:
            flags = ["--state-slots", str(slots), "--max-running", str(options.rows), "--log-level", "warning"]
            return stack.enter_context(Served(folder, threads, flags, workbench.log(name)))

        one = start("one", options.engines * options.slots)
        with Router([one.url], workbench.log("router of one")) as router:
            asyncio.run(compare_costs(one, router, options, rounds))
        several = [start(f"engine {number}", options.slots) for number in range(options.engines)]
        with Router([each.url for each in several], workbench.log("router")) as router:
            shape = options.agents, options.turns
            alone = asyncio.run(play(one.url, *shape, options.rows))
            routed = asyncio.run(play(router.url, *shape, options.rows))
    print(f"{options.agents} agents with {options.turns} turns")
    print(f"  one engine with {options.engines * options.slots} slots: {alone.reused:.1%} of the prompts reused")
    print(
        f"  {options.engines} engines with {options.slots} slots: {routed.reused:.1%} reused, "
        f"{routed.reused / alone.reused:.3f} of the one's"
    )


class Router(ServerProcess):
    """`baton route` in front of engines."""

    def __init__(self, urls: Sequence[str], log: Path) -> None:
        engines = [option for url in urls for option in ("--engine", url)]
        command = [sys.executable, "-m", "baton.api.cli", "route", *engines, "--log-level", "warning"]
        super().__init__(command, 1, log, "/ready")

    @property
    def seconds(self) -> float:
        """Processor seconds of its main thread, in which everything happens."""
        return int(Path(f"/proc/{self.process}/schedstat").read_text().split()[0]) / 1e9


async def compare_costs(engine: Served, router: Router, options: argparse.Namespace, rounds: int) -> None:
    """Print the router's processor time, and the first tokens with and without it. The first round warms up."""
    chunks, requests, ratios = list[float](), list[float](), list[float]()
    limit = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=limit) as http:
        for number in range(rounds + 1):
            before = router.seconds
            prompts = [draw(16) for _ in range(options.rows)]
            counts = await asyncio.gather(*(stream(http, router.url, each, options.tokens) for each in prompts))
            streamed = (router.seconds - before) / sum(count for count, _ in counts)
            before = router.seconds
            for _ in range(options.requests):
                await complete(http, router.url, draw(16))
            answered = (router.seconds - before) / options.requests
            urls = (engine.url, router.url) if number % 2 else (router.url, engine.url)
            first = {url: (await stream(http, url, draw(options.prompt), 1))[1] for url in urls}
            if number:
                chunks.append(1e6 * streamed)
                requests.append(1e6 * answered)
                ratios.append(first[router.url] / first[engine.url])
    print(f"router, processor time of a streamed chunk ({options.rows} streams): {Spread.of(chunks)} µs")
    print(f"router, processor time of a complete request: {Spread.of(requests)} µs")
    print(f"first token of {options.prompt} tokens, through the router / without it: {Spread.of(ratios)}")


def draw(tokens: int) -> list[int]:
    return [random.randrange(VARIETY) for _ in range(tokens)]


async def stream(http: aiohttp.ClientSession, url: str, prompt: list[int], tokens: int) -> tuple[int, float]:
    """Return how many chunks a streamed completion has, and the seconds to the first one."""
    body = {"prompt": prompt, "max_tokens": tokens, "stream": True, **SHORT}
    began, first, count = time.perf_counter(), 0.0, 0
    async with http.post(f"{url}/v1/completions", json=body, raise_for_status=True) as answer:
        async for line in answer.content:
            if line.startswith(b"data: {"):
                first = first or time.perf_counter() - began
                count += 1
    return count, first


async def complete(http: aiohttp.ClientSession, url: str, prompt: list[int]) -> None:
    body = {"prompt": prompt, "max_tokens": 1, **SHORT}
    async with http.post(f"{url}/v1/completions", json=body, raise_for_status=True) as answer:
        await answer.read()


@dataclass
class Reuse:
    """Tokens of prompts."""

    prompts: int = 0
    cached: int = 0

    @property
    def reused(self) -> float:
        return self.cached / self.prompts


async def play(url: str, agents: int, turns: int, at_once: int) -> Reuse:
    """Let agents take turns at an address, at most `at_once` at a time; return how much of the prompts was reused."""
    chance, reuse, places = random.Random(1), Reuse(), asyncio.Semaphore(at_once // 2)
    system = [{"role": "system", "content": f"You are agent number {number}. {WORDS * 4}"} for number in range(3)]
    chats = [[system[number % 3], {"role": "user", "content": f"Do task {number}."}] for number in range(agents)]
    async with aiohttp.ClientSession(url) as http:
        for _ in range(turns):
            order = chance.sample(range(agents), agents)
            await asyncio.gather(*(turn(http, chats[number], reuse, places) for number in order))
    return reuse


async def turn(
    http: aiohttp.ClientSession, messages: list[dict[str, str]], reuse: Reuse, places: asyncio.Semaphore
) -> None:
    """Ask for an answer to a chat, and add it and a further message to the chat."""
    async with places:
        body = {"messages": messages, "max_tokens": 8, **SHORT}
        async with http.post("/v1/chat/completions", json=body, raise_for_status=True) as answer:
            found = json.loads(await answer.read())
    reuse.prompts += found["usage"]["prompt_tokens"]
    reuse.cached += found["usage"]["prompt_tokens_details"]["cached_tokens"]
    messages.append({"role": "assistant", "content": found["choices"][0]["message"]["content"] or ""})
    messages.append({"role": "user", "content": f"{len(messages)} {WORDS}"})
