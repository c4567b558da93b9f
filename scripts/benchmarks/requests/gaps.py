"""What streams wait for between their tokens while a long prompt is read beside them, and what the prompt waits."""

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import aiohttp
import anyio

from scripts.benchmarks.common.contenders import Entry, Workbench
from scripts.benchmarks.common.server import Served

SHORT, MANY = 16, 4096
WARM_UP, CALM_TOKENS = 4, 40


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=4, help="streams that decode")
    parser.add_argument("--prompt", type=int, default=4000, help="tokens of the long prompt")
    parser.add_argument(
        "--step-time", type=float, nargs="+", default=[0.0], help="seconds, for one server each; 0: the server's choice"
    )


def run(options: argparse.Namespace, workbench: Workbench) -> None:
    for seconds in options.step_time:
        with workbench.serve(Entry.parse("baton"), "--step-time", str(seconds)) as served:
            vocabulary, rounds = workbench.config["vocab_size"], options.rounds or 5
            figures = asyncio.run(measure(served, vocabulary, options.streams, options.prompt, rounds))
            show(f"--step-time {seconds:g}", figures)


@dataclass
class Figures:
    """Seconds, over all rounds: between tokens, without the prompt and beside it; to its first token."""

    calm: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    answered: list[float] = field(default_factory=list)


class Stream:
    """When each of its tokens has come. warm: CALM_TOKENS have."""

    def __init__(self) -> None:
        self.arrivals: list[float] = []
        self.warm = anyio.Event()

    def note(self, at: float) -> None:
        self.arrivals.append(at)
        if len(self.arrivals) == CALM_TOKENS:
            self.warm.set()


class Load:
    """Draws prompts, and streams their answers."""

    def __init__(self, http: aiohttp.ClientSession, vocabulary: int) -> None:
        self._http, self._vocabulary = http, vocabulary
        self._random = random.Random(0)

    async def first_token(self, tokens: int) -> float:
        began = time.perf_counter()
        stream = Stream()
        await self._receive(stream, tokens, 1)
        return stream.arrivals[0] - began

    async def round(self, streams: int, prompt: int, figures: Figures) -> None:
        """The streams run; then the prompt comes, and with its first token they are given up."""
        async with self.running(streams) as running:
            asked = time.perf_counter()
            figures.answered.append(await self.first_token(prompt))
        for stream in running:
            gaps = [(later, later - earlier) for earlier, later in pairwise(stream.arrivals[WARM_UP:])]
            figures.calm += [gap for at, gap in gaps if at < asked]
            figures.beside += [gap for at, gap in gaps if asked <= at <= asked + figures.answered[-1]]

    @asynccontextmanager
    async def running(self, streams: int) -> AsyncIterator[list[Stream]]:
        """So many streams, warm; they are given up when the context is left."""
        running = [Stream() for _ in range(streams)]
        async with anyio.create_task_group() as tasks:
            for stream in running:
                tasks.start_soon(self._receive, stream, SHORT, MANY)
            for stream in running:
                await stream.warm.wait()
            yield running
            tasks.cancel_scope.cancel()

    async def _receive(self, stream: Stream, prompt: int, max_tokens: int) -> None:
        tokens = [self._random.randrange(self._vocabulary) for _ in range(prompt)]
        sampling = {"max_new_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": tokens, "sampling_params": sampling, "stream": True}
        async with self._http.post("/generate", json=body, raise_for_status=True) as answer:
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    stream.note(time.perf_counter())


async def measure(served: Served, vocabulary: int, streams: int, prompt: int, rounds: int) -> Figures:
    """The prompt alone and beside the streams in turns; the first round is unmeasured."""
    figures = Figures()
    async with aiohttp.ClientSession(served.url) as http:
        load = Load(http, vocabulary)
        for number in range(rounds + 1):
            figures = Figures() if number <= 1 else figures
            figures.alone.append(await load.first_token(prompt))
            await load.round(streams, prompt, figures)
    return figures


def show(name: str, figures: Figures) -> None:
    print(f"{name}")
    for what, gaps in (("between tokens", figures.calm), ("between tokens, beside the prompt", figures.beside)):
        print(f"  {what:<36} p50 {1000 * statistics.median(gaps):7.1f} ms, p99 {1000 * at(gaps, 0.99):7.1f} ms")
    longer = statistics.median(b / a for a, b in zip(figures.alone, figures.answered, strict=True))
    alone, answered = statistics.median(figures.alone), statistics.median(figures.answered)
    print(f"  {'first token of the prompt':<36} {alone:.2f} s alone, {answered:.2f} s beside them: {longer:.2f} times")


def at(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]
