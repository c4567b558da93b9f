"""Inter-token latency of streams, with and without a long prompt in the batch, and the prompt's time to first token."""

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
    """The measured seconds of all rounds."""

    calm: list[float] = field(default_factory=list)  # between two tokens of a stream, before the prompt is sent
    disturbed: list[float] = field(default_factory=list)  # between two tokens of a stream, while the prompt is read
    alone: list[float] = field(default_factory=list)  # time to first token of the prompt, without streams
    together: list[float] = field(default_factory=list)  # time to first token of the prompt, with streams


class Stream:
    """The arrival times of an answer's tokens; `warm` is set after CALM_TOKENS tokens."""

    def __init__(self) -> None:
        self.arrivals: list[float] = []
        self.warm = anyio.Event()

    def note(self, at: float) -> None:
        self.arrivals.append(at)
        if len(self.arrivals) == CALM_TOKENS:
            self.warm.set()


class Load:
    """A client that draws prompts and streams their answers."""

    def __init__(self, http: aiohttp.ClientSession, vocabulary: int) -> None:
        self._http, self._vocabulary = http, vocabulary
        self._random = random.Random(0)

    async def first_token(self, tokens: int) -> float:
        """Send a new prompt of `tokens` tokens, and return the seconds to its first token."""
        began = time.perf_counter()
        stream = Stream()
        await self._receive(stream, tokens, 1)
        return stream.arrivals[0] - began

    async def round(self, streams: int, prompt: int, figures: Figures) -> None:
        """Start the streams, send the prompt when all are warm, and abort the streams at the prompt's first token."""
        async with self.running(streams) as running:
            sent_at = time.perf_counter()
            figures.together.append(await self.first_token(prompt))
        for stream in running:
            gaps = [(later, later - earlier) for earlier, later in pairwise(stream.arrivals[WARM_UP:])]
            figures.calm += [gap for at, gap in gaps if at < sent_at]
            figures.disturbed += [gap for at, gap in gaps if sent_at <= at <= sent_at + figures.together[-1]]

    @asynccontextmanager
    async def running(self, streams: int) -> AsyncIterator[list[Stream]]:
        """A context in which this many streamed requests run. It begins when all are warm, and its end aborts them."""
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
    """Measure, in each round, the prompt alone and then with the streams. The first round is dropped."""
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
    for what, gaps in (("between tokens", figures.calm), ("between tokens, with the prompt", figures.disturbed)):
        print(f"  {what:<36} p50 {1000 * statistics.median(gaps):7.1f} ms, p99 {1000 * at(gaps, 0.99):7.1f} ms")
    longer = statistics.median(b / a for a, b in zip(figures.alone, figures.together, strict=True))
    alone, together = statistics.median(figures.alone), statistics.median(figures.together)
    print(f"  {'first token of the prompt':<36} {alone:.2f} s alone, {together:.2f} s with streams: {longer:.2f} times")


def at(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]
