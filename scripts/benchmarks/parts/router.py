"""Processor time of the router for one request, and the memory of its index, by the number of engines."""

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path

from baton.api.routing.asking import read_asking
from baton.api.routing.choice import Engines
from baton.api.routing.index import StateIndex
from baton.api.routing.prompts import Chains
from scripts.benchmarks.common.contenders import Workbench
from scripts.benchmarks.common.figures import cpu_name, table

CHAT = "/v1/chat/completions"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--states", type=int, default=5000, help="cached states of each engine")
    parser.add_argument("--turns", type=int, default=20, help="messages of the chat that is routed")


def run(options: argparse.Namespace, workbench: Workbench) -> None:
    print(cpu_name())
    rows = {f"{engines:,}": measure(engines, options.states, options.turns) for engines in options.engines}
    print(table("engines", ["states", "index", "reading a request", "choosing", "an event of 10 states"], rows))


def measure(count: int, states: int, turns: int) -> list[str]:
    """Return a line of the table."""
    chance, before = random.Random(0), resident_bytes()
    index = StateIndex()
    engines, chains = Engines(index), Chains(index)
    for engine in range(count):
        index.add(engine, (chance.getrandbits(64) for _ in range(states)))
        engines.report(engine, chance.random(), 1e-4 * (1 + chance.random()), 0.02, chance.randrange(16), 16)
    size = resident_bytes() - before
    messages = [{"role": "user" if turn % 2 == 0 else "assistant", "content": "word " * 80} for turn in range(turns)]
    body = json.dumps({"model": "baton", "messages": messages, "stream": True}).encode()
    asking = read_asking(CHAT, body, b"")
    digests = [chance.getrandbits(64) for _ in range(3)]
    index.add(count - 1, digests)
    chains.learn(
        read_asking(CHAT, json.dumps({"messages": messages[:-2]}).encode(), b"").chain, 2000, [(2000, digests[0])]
    )

    def choose() -> None:
        chosen = engines.choose(chains.demand(asking.chain))
        assert chosen is not None
        engines.answered(chosen.sent)

    def change() -> None:
        fresh = [chance.getrandbits(64) for _ in range(10)]
        index.add(0, fresh)
        index.remove(0, fresh)
        engines.report(0, 0.0, 1e-4, 0.02, 3, 16)

    reading = microseconds(lambda: read_asking(CHAT, body, b""))
    return [
        f"{count * states:,}", f"{size / 2**20:,.0f} MiB",
        *(f"{each:.0f} µs" for each in (reading, microseconds(choose), microseconds(change))),
    ]  # fmt: skip


def microseconds(work: Callable[[], None] | Callable[[], object], repeats: int = 2000) -> float:
    """Return the least mean time of five series of calls."""
    means = []
    for _ in range(5):
        began = time.process_time()
        for _ in range(repeats // 5):
            work()
        means.append((time.process_time() - began) / (repeats // 5))
    return min(means) * 1e6


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
