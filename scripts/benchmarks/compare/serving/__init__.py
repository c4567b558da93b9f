"""TTFT, inter-token latency, throughput and cache hits of each contender with many concurrent requests."""

import argparse
import asyncio
import contextlib
import statistics
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import get_args

import aiohttp

from scripts.benchmarks.common.contenders import Entry, Workbench, add_contenders
from scripts.benchmarks.common.figures import describe_machine, quantile, table, write_json
from scripts.benchmarks.common.machine import QUIET, Watch
from scripts.benchmarks.common.server import ServerProcess
from scripts.benchmarks.compare.serving.batches import StaticBatches
from scripts.benchmarks.compare.serving.client import Answer, OverHTTP, Target, drive
from scripts.benchmarks.compare.serving.schedule import Load, Workload, draw
from scripts.benchmarks.peers.environments import python_of
from scripts.benchmarks.peers.process import Peer

DEFAULT = ("baton", "llama.cpp:bf16", "transformers")


@dataclass(frozen=True)
class Figures:
    """The figures of one contender in one round."""

    first_p50: float  # median seconds to the first token
    first_p99: float
    gap_p50: float  # median seconds between two tokens of an answer
    gap_p99: float
    tokens: float  # generated tokens per second
    requests: float  # answered requests per second
    hit_rate: float | None  # share of prompt tokens found in the cache; None if the server does not report it
    errors: int
    others: float  # mean number of processors that other processes used during the round


def add_options(parser: argparse.ArgumentParser) -> None:
    add_contenders(parser)
    parser.add_argument(
        "--server-options", default="", metavar="OPTIONS", help="options for each baton server, as one string"
    )
    parser.add_argument("--url", nargs="+", default=[], metavar="NAME=URL", help="servers that already run")
    parser.add_argument("--workload", choices=get_args(Workload), default="unique")
    parser.add_argument("--requests", type=int, default=64, help="conversations in each round")
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--streams", type=int, default=32, help="concurrent conversations")
    load.add_argument("--rate", type=float, help="conversations that begin per second, instead of --streams")
    parser.add_argument("--prompt", type=int, default=128, help="new tokens of each turn")
    parser.add_argument("--answer", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--shared", type=int, default=512, help="tokens of a shared prefix, with --workload shared")
    parser.add_argument("--prefixes", type=int, default=4, help="number of shared prefixes")
    parser.add_argument("--turns", type=int, default=4, help="turns of a conversation, with --workload turns")


def run(options: argparse.Namespace, workbench: Workbench) -> int:
    load = Load(**{name: getattr(options, name) for name in Load.__dataclass_fields__})
    bench = Workbench(workbench.config, workbench.folder, workbench.threads, load.streams)
    entries = [] if options.url and not options.contenders else options.contenders or list(map(Entry.parse, DEFAULT))
    for entry in entries:
        if reason := bench.missing(entry):
            print(reason)
    entries = [entry.with_options(options.server_options) for entry in entries if not bench.missing(entry)]
    with contextlib.ExitStack() as stack:
        places: dict[str, str | Peer] = dict(named.partition("=")[::2] for named in options.url)
        places |= {entry.name: stack.enter_context(place_of(entry, bench)) for entry in entries}
        rounds = measure(places, load, bench.config["vocab_size"], options.rounds or 3)
    show(rounds, load)
    record = {"command": "serving", "model": options.model, "machine": describe_machine(bench.threads)}
    by_name = {name: [asdict(figures) for figures in found] for name, found in rounds.items()}
    write_json(options.json, record | {"load": asdict(load), "rounds": by_name})
    return 0


@contextmanager
def place_of(entry: Entry, bench: Workbench) -> Iterator[str | Peer]:
    """Start a contender; yield the address of its server, or its process if it has no server."""
    if entry.kind == "baton":
        with bench.serve(entry) as served:
            yield served.url
    elif entry.kind == "llama.cpp":
        with llama_cpp_server(entry, bench) as server:
            yield server.url
    else:
        with bench.peer(entry) as peer:
            yield peer


def llama_cpp_server(entry: Entry, bench: Workbench) -> ServerProcess:
    """Return the process of `python -m llama_cpp.server`, which answers one request after another."""
    python, threads = python_of("llama.cpp"), str(bench.threads)
    assert python is not None
    command = [python, "-m", "llama_cpp.server", "--model", str(bench.gguf(entry.variant)), "--n_threads", threads]
    sizes = ["--n_ctx", "16384", "--n_batch", "512", "--n_threads_batch", threads]
    log = bench.log(f"{entry.name}-server")
    # Without this option, a new request aborts the running request.
    return ServerProcess([*command, *sizes, "--interrupt_requests", "false"], bench.threads, log, "/v1/models")


def measure(places: dict[str, str | Peer], load: Load, vocabulary: int, rounds: int) -> dict[str, list[Figures]]:
    """Return each contender's figures by round. A short additional round warms up first.

    Each round begins with a different contender.
    """
    found: dict[str, list[Figures]] = {name: [] for name in places}
    brief = Load(**asdict(load) | {"requests": min(load.requests, load.streams), "answer": min(load.answer, 8)})
    for place in places.values():
        asyncio.run(ask(place, brief, vocabulary, seed=0))
    for number in range(1, rounds + 1):
        names = list(places)
        first = number % len(names)
        for name in names[first:] + names[:first]:
            with Watch() as watch:
                answers = asyncio.run(ask(places[name], load, vocabulary, seed=number))
            found[name].append(summarise(answers, watch.others))
    return found


async def ask(place: str | Peer, load: Load, vocabulary: int, seed: int) -> list[Answer]:
    """Send one round of requests to a contender, and return the answers."""
    async with target_of(place, load) as target:
        return await drive(target, draw(load, vocabulary, seed), load)


@asynccontextmanager
async def target_of(place: str | Peer, load: Load) -> AsyncIterator[Target]:
    if isinstance(place, str):
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout()
        async with aiohttp.ClientSession(place, connector=connector, timeout=timeout) as http:
            yield OverHTTP(http)
    else:
        async with StaticBatches(place, load.streams) as batches:
            yield batches


def summarise(answers: Sequence[Answer], others: float) -> Figures:
    """Return the figures of one round. Raises RuntimeError, with the first error, if no request was answered."""
    good = [answer for answer in answers if not answer.error]
    if not good:
        raise RuntimeError(f"none of {len(answers)} requests was answered: {answers[0].error}")
    first = [answer.arrivals[0] - answer.begin for answer in good]
    gaps = [later - earlier for answer in good for earlier, later in pairwise(answer.arrivals)] or [0.0]
    seconds = max(answer.arrivals[-1] for answer in good) - min(answer.begin for answer in answers)
    reporting = [answer for answer in good if answer.cached_tokens is not None and answer.prompt_tokens]
    prompts = sum(answer.prompt_tokens for answer in reporting)
    return Figures(
        first_p50=quantile(first, 0.5),
        first_p99=quantile(first, 0.99),
        gap_p50=quantile(gaps, 0.5),
        gap_p99=quantile(gaps, 0.99),
        tokens=sum(answer.completion_tokens for answer in good) / seconds,
        requests=len(good) / seconds,
        hit_rate=sum(answer.cached_tokens or 0 for answer in reporting) / prompts if prompts else None,
        errors=len(answers) - len(good),
        others=others,
    )


def show(rounds: dict[str, list[Figures]], load: Load) -> None:
    def medians(of: str, scale: float, digits: int) -> list[str]:
        columns = [[getattr(figures, of) for figures in found] for found in rounds.values()]
        return ["-" if None in column else f"{scale * statistics.median(column):,.{digits}f}" for column in columns]

    pace = f"{load.rate:g} a second" if load.rate else f"{load.streams} streams"
    print(
        f"{load.requests} conversations ({load.workload}), {pace}, prompts of {load.prompt}, answers of {load.answer}"
    )
    rows = {
        "first token p50, ms": medians("first_p50", 1e3, 0),
        "first token p99, ms": medians("first_p99", 1e3, 0),
        "between tokens p50, ms": medians("gap_p50", 1e3, 1),
        "between tokens p99, ms": medians("gap_p99", 1e3, 1),
        "tokens/s": medians("tokens", 1, 1),
        "requests/s": medians("requests", 1, 2),
        "prompt tokens from the cache, %": medians("hit_rate", 100, 0),
        "errors": medians("errors", 1, 0),
    }
    count = len(next(iter(rounds.values())))
    print(table(f"medians of {count} rounds", list(rounds), rows))
    busy = [figures.others > QUIET for found in rounds.values() for figures in found]
    print(f"in {sum(busy)} of {len(busy)} turns other processes ran")
