"""`scripts/replay engines`: several engines with a router, compared with one engine that has all their slots."""

import argparse
import statistics
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from random import Random

from scripts.replaying.choices import CHOICES
from scripts.replaying.fleet import make_fleet, make_one_engine
from scripts.replaying.play import Outcome, play
from scripts.replaying.workloads import WORKLOADS, Arrival, Workload, chat, merged, text

ONE = "one engine"


def one_system_prompt(rng: Random, requests: int) -> Iterator[Arrival]:
    """Run short chats that all begin with the same long system prompt, as many as four engines can answer."""
    system, turns, at = text(rng, 1000, 1000), 5, 0.0
    for _ in range(requests // turns):
        at += rng.expovariate(6)
        yield Arrival(at, chat(Random(rng.random()), system, turns, lambda: 10.0))


ALL = {**WORKLOADS, "one system prompt": Workload(one_system_prompt)}


@dataclass(frozen=True)
class Line:
    """The outcome of one rule."""

    outcome: Outcome
    imbalance: float  # busy time of the busiest engine, as a multiple of the mean

    @property
    def shown(self) -> str:
        seconds = sorted(self.outcome.first_tokens)
        late = seconds[int(len(seconds) * 0.99)]
        busiest = f"busiest engine {self.imbalance:.2f} of the mean, " if self.imbalance else ""
        return f"{busiest}first token {statistics.median(seconds):.3f} s, p99 {late:.3f}"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workload", nargs="*", choices=list(ALL), default=list(ALL), metavar="NAME")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--slots", type=int, default=16, help="of each engine")
    parser.add_argument("--times", type=int, default=1, help="the workload so many times at once, each drawn by itself")
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=1)


def run(options: argparse.Namespace, pool: Executor) -> None:
    """Print the outcomes of each workload: of one engine, and of each rule."""
    rules = [ONE, *CHOICES]
    play_one = partial(play_rule, options.engines, options.slots, options.times, options.requests, options.seed)
    lines = {name: [pool.submit(play_one, name, rule) for rule in rules] for name in options.workload}
    print(f"{options.engines} engines with {options.slots} slots each")
    for name, futures in lines.items():
        print(name)
        whole = futures[0].result()
        for rule, future in zip(rules, futures, strict=True):
            line = future.result()
            share = line.outcome.reused / whole.outcome.reused
            print(f"  {rule:12} {line.outcome.reused:6.1%} reused, {share:.3f} of the one's, {line.shown}", flush=True)


def play_rule(engines: int, slots: int, times: int, requests: int, seed: int, name: str, rule: str) -> Line:
    """Play a workload with several engines by a rule, or with one engine that has all their slots and throughput."""
    workload = several(ALL[name], times)
    if rule == ONE:
        return Line(play(workload, make_one_engine(engines, slots), requests, seed), 0.0)
    fleet = make_fleet(engines, slots, CHOICES[rule])
    return Line(play(workload, fleet, requests, seed), fleet.imbalance)


def several(workload: Workload, times: int) -> Workload:
    """Return so many workloads at once, each drawn by itself."""
    if times == 1:
        return workload

    def draw(rng: Random, requests: int) -> Iterator[Arrival]:
        return merged(*(workload.draw(Random(rng.random()), requests // times) for _ in range(times)))

    return Workload(draw, workload.block)
