"""An engine with and without a router; several engines compared with one that has all their slots.

Prints the router's processor time for each streamed chunk and each request, and that of a process that only copies
bytes; the time to the first token through each, divided by that without it; and how much of agents' prompts was reused.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from scripts.benchmarks.common.contenders import Workbench
from scripts.benchmarks.common.figures import Spread, cpu_name
from scripts.benchmarks.common.server import Served, ServerProcess
from scripts.benchmarks.requests.agents import WORDS, with_chat

SHORT = {"temperature": 0, "ignore_eos": True}
ALONE = "the engine alone"
VARIETY = 250  # the byte tokens that prompts are drawn from


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=16, help="streams at once")
    parser.add_argument("--tokens", type=int, default=400, help="of each stream")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompts whose first token is timed")
    parser.add_argument("--firsts", type=int, default=5, help="first tokens in a round")
    parser.add_argument("--requests", type=int, default=200, help="complete requests of one token")
    parser.add_argument("--at-once", type=int, default=8, help="of these requests")
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
            rows = "--max-running", str(options.rows)
            flags = ["--state-slots", str(slots), *rows, "--speculation", "off", "--log-level", "warning"]
            return stack.enter_context(Served(folder, threads, flags, workbench.log(name)))

        one = start("one", options.engines * options.slots)
        bare, router = BareRelay(one, workbench.log("bare relay")), Router([one.url], workbench.log("router of one"))
        with bare, router:
            asyncio.run(compare_costs(one, {"bare relay": bare, "router": router}, options, rounds))
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


class Relay(ServerProcess):
    """A process between clients and engines, in whose main thread everything happens."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        super().__init__([sys.executable, "-m", *command], 1, log, "/ready")

    @property
    def seconds(self) -> float:
        """Processor seconds so far."""
        return int(Path(f"/proc/{self.process}/schedstat").read_text().split()[0]) / 1e9


class BareRelay(Relay):
    """The least that a router can cost: a process that copies bytes."""

    def __init__(self, engine: Served, log: Path) -> None:
        super().__init__(["scripts.benchmarks.requests.bare_relay", "--to", engine.url.rpartition(":")[2]], log)


class Router(Relay):
    """`baton route` in front of engines."""

    def __init__(self, urls: Sequence[str], log: Path) -> None:
        engines = [option for url in urls for option in ("--engine", url)]
        super().__init__(["baton.api.cli", "route", *engines, "--log-level", "warning"], log)


@dataclass
class RelayCosts:
    """The costs of a relay, in each round."""

    chunk: list[float] = field(default_factory=list)  # processor microseconds, without the stream's request
    request: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)  # seconds to the first token


async def compare_costs(engine: Served, relays: Mapping[str, Relay], options: argparse.Namespace, rounds: int) -> None:
    """Print each relay's processor time, and the first tokens with and without it. The first round warms up."""
    found = {name: RelayCosts() for name in (ALONE, *relays)}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        for number in range(rounds + 1):
            for name, relay in relays.items():
                chunk, request = await measure(http, relay, options)
                if number:
                    found[name].chunk.append(chunk)
                    found[name].request.append(request)
            for _ in range(options.firsts):
                for name, server in random.sample([(ALONE, engine), *relays.items()], 1 + len(relays)):
                    seconds = (await stream(http, server.url, draw(options.prompt), 1))[1]
                    if number:
                        found[name].first.append(seconds)
    for name in relays:
        costs = found[name]
        print(f"{name}: {Spread.of(costs.chunk)} µs a chunk of {options.rows} streams", end=", ")
        print(f"{Spread.of(costs.request)} µs a request of {options.at_once} at once", end=", ")
        ratio = statistics.median(costs.first) / statistics.median(found[ALONE].first)
        print(f"first token of {options.prompt} tokens {ratio:.3f} of the engine's own")


async def measure(http: aiohttp.ClientSession, relay: Relay, options: argparse.Namespace) -> tuple[float, float]:
    """Return the processor microseconds of a streamed chunk, and of a complete request of one token.

    The requests of the streams are not counted with their chunks: each is taken for a complete one.
    """
    before = relay.seconds
    prompts = [draw(16) for _ in range(options.rows)]
    counts = await asyncio.gather(*(stream(http, relay.url, each, options.tokens) for each in prompts))
    streamed = relay.seconds - before
    before = relay.seconds

    async def some() -> None:
        for _ in range(options.requests // options.at_once):
            await complete(http, relay.url, draw(16))

    await asyncio.gather(*(some() for _ in range(options.at_once)))
    answered = (relay.seconds - before) / (options.requests // options.at_once * options.at_once)
    return 1e6 * (streamed - options.rows * answered) / sum(count for count, _ in counts), 1e6 * answered


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
