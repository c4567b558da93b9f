"""`scripts/replay sessions`: the router's choice for very many engines and sessions, with engines that are pretended.

A pretended engine keeps the states that were used last, computes one prompt after the other, and reports its load and
its states every half second. The router's own code chooses. One engine with all slots shows what there was to reuse.
"""

import argparse
import itertools
import random
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from baton.api.routing.choice import Chosen, Engines, Place
from baton.api.routing.index import StateIndex
from baton.api.routing.prompts import Chain, Chains
from scripts.replaying.clock import Clock

REPORT_S = 0.5
TOKEN_S, STEP_S, ANSWER_S = 1e-3, 0.02, 2.0  # time of a prompt token, of a step, of an answer after its first token
PROMPTS = 200  # system prompts
SYSTEM, QUESTION, ANSWER = 800, 100, 100  # tokens, at most or on average
TURNS = 3.0  # turns of a session, on average
PAUSE_S = 30.0  # between two turns, on average
BYTES = 4  # bytes of a token


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engines", type=int, default=1000)
    parser.add_argument("--slots", type=int, default=512, help="states of each engine")
    parser.add_argument("--sessions", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=600.0, help="in which the sessions begin")
    parser.add_argument("--seed", type=int, default=1)


def run(options: argparse.Namespace) -> None:
    before, began = resident_bytes(), time.perf_counter()
    simulation = Simulation(Clock(), options.engines, options.slots, options.seed)
    simulation.play(options.sessions, options.seconds)
    print(simulation.shown())
    minutes, size = (time.perf_counter() - began) / 60, (resident_bytes() - before) / 2**20
    print(f"memory {size:,.0f} MiB with the pretended engines; the run took {minutes:.1f} minutes")


@dataclass(eq=False, slots=True)
class Session:
    """A session, whose prompt grows from turn to turn."""

    number: int
    system: int  # number of its system prompt
    left: int  # turns that are left
    digests: list[int]  # digest of each beginning of its prompt
    ends: list[int]  # length of each of these beginnings, in tokens
    places: list[Place] = field(default_factory=list)  # where its states may lie, in order


@dataclass(eq=False, slots=True)
class PretendedEngine:
    """An engine that keeps the states that were used last."""

    slots: int
    states: OrderedDict[int, None] = field(default_factory=OrderedDict)  # the least recently used first
    come: set[int] = field(default_factory=set)  # states since the last report
    gone: set[int] = field(default_factory=set)
    free_at: float = 0.0
    busy: float = 0.0
    rows: int = 0

    def cached(self, places: Sequence[Place]) -> int:
        """Return how many tokens of a prompt are cached, and note the use."""
        for position, digest in reversed(places):
            if digest in self.states:
                self.states.move_to_end(digest)
                return position
        return 0

    def keep(self, digest: int) -> None:
        self.states[digest] = None
        self.states.move_to_end(digest)
        self.come.add(digest)
        self.gone.discard(digest)
        if len(self.states) > self.slots:
            oldest, _ = self.states.popitem(last=False)
            self.gone.add(oldest)
            self.come.discard(oldest)


class Simulation:
    """Sessions, pretended engines, and the router's choice among them."""

    def __init__(self, clock: Clock, engines: int, slots: int, seed: int) -> None:
        self._clock, self._random = clock, random.Random(seed)
        self._systems = [self._random.randint(SYSTEM // 4, SYSTEM) for _ in range(PROMPTS)]
        self._engines = [PretendedEngine(slots) for _ in range(engines)]
        self._one = PretendedEngine(engines * slots)
        self._index = StateIndex()
        self._router, self._chains = Engines(self._index, lambda: clock.now), Chains(self._index)
        self._numbers = itertools.count(1)
        self.requests = self.tokens = self.reused = self.of_one = 0  # tokens of prompts, and those that were reused
        self._waited = self._most_waited = self._choosing = 0.0  # seconds

    def play(self, sessions: int, seconds: float) -> None:
        """Let sessions begin within so many seconds, and run until all have ended."""
        for number in range(len(self._engines)):
            self._report(number)
        self._begin(sessions, sessions / seconds)
        self._clock.run(lambda: None)

    @property
    def imbalance(self) -> float:
        """The busy time of the busiest engine, as a multiple of the mean."""
        busy = [engine.busy for engine in self._engines]
        return max(busy) * len(busy) / sum(busy)

    def _begin(self, sessions: int, rate: float) -> None:
        """Begin a session, and schedule the ones after it."""
        if sessions:
            self._turn(self._session())
            wait = self._random.expovariate(rate)
            self._clock.at(self._clock.now + wait, lambda: self._begin(sessions - 1, rate))

    def shown(self) -> str:
        busy = sorted(engine.busy for engine in self._engines)
        mean = sum(busy) / len(busy)
        choosing = 1e6 * self._choosing / self.requests
        return "\n".join(
            (
                f"{len(self._engines):,} engines, {self.requests:,} requests",
                f"{self.reused / self.tokens:.1%} of the prompts reused, {self.reused / self.of_one:.3f} of what "
                "one engine with all slots reuses",
                f"busiest engine {self.imbalance:.2f} of the mean, 99th percentile "
                f"{busy[int(len(busy) * 0.99)] / mean:.2f}; engines {mean / self._clock.now:.0%} busy",
                f"a request waits {1e3 * self._waited / self.requests:.1f} ms on average, "
                f"at most {self._most_waited:.2f} s",
                f"choosing {choosing:.0f} µs a request, {len(self._index):,} states in the index",
            )
        )

    def _session(self) -> Session:
        number, system = next(self._numbers), min(int(self._random.paretovariate(0.8)) - 1, PROMPTS - 1)
        turns = 1 + int(self._random.expovariate(1 / (TURNS - 1)))
        length = self._systems[system]
        return Session(number, system, turns, [system + 1], [length], [(length, system + 1)])

    def _turn(self, session: Session) -> None:
        """Send a session's next request."""
        self._extend(session, QUESTION)
        chain = Chain(list(session.digests), [BYTES * end for end in session.ends])
        began = time.perf_counter()
        chosen = self._router.choose(self._chains.demand(chain))
        assert chosen is not None
        self._chains.sent(chain, chosen.engine)
        self._choosing += time.perf_counter() - began
        self._compute(session, chain, chosen)

    def _compute(self, session: Session, chain: Chain, chosen: Chosen) -> None:
        engine, now, length = self._engines[chosen.engine], self._clock.now, session.ends[-1]
        cached = engine.cached(session.places)
        seconds = (length - cached) * TOKEN_S
        engine.free_at = max(engine.free_at, now) + seconds
        engine.busy += seconds
        engine.rows += 1
        waited = engine.free_at - now
        self.requests += 1
        self.tokens += length
        self.reused += cached
        self.of_one += self._one.cached(session.places)
        self._waited += waited
        self._most_waited = max(self._most_waited, waited)
        self._clock.at(engine.free_at, lambda: self._router.answered(chosen.sent))
        ended = engine.free_at + self._random.expovariate(1 / ANSWER_S)
        self._clock.at(ended, lambda: self._end(session, chain, engine, cached))

    def _end(self, session: Session, chain: Chain, engine: PretendedEngine, cached: int) -> None:
        """Keep the states of a request, let the router learn of them, and schedule the next turn."""
        engine.rows -= 1
        length, prompt = session.ends[-1], session.digests[-1]
        self._extend(session, ANSWER)
        system = (self._systems[session.system], session.system + 1)
        session.places = [system, (length, prompt), (session.ends[-1], session.digests[-1])]
        for _, digest in session.places:
            for each in (engine, self._one):
                each.keep(digest)
        known = [system] if cached <= system[0] else []
        self._chains.learn(chain, length, [*known, *session.places[1:]])
        session.left -= 1
        if session.left:
            self._clock.at(self._clock.now + self._random.expovariate(1 / PAUSE_S), lambda: self._turn(session))

    def _extend(self, session: Session, tokens: int) -> None:
        session.ends.append(session.ends[-1] + self._random.randint(1, 2 * tokens))
        session.digests.append(hash((session.number, len(session.digests))))

    def _report(self, number: int) -> None:
        engine, now = self._engines[number], self._clock.now
        self._index.add(number, engine.come)
        self._index.remove(number, engine.gone)
        engine.come, engine.gone = set(), set()
        self._router.report(number, max(engine.free_at - now, 0.0), TOKEN_S, STEP_S, engine.rows, engine.slots)
        if self._clock.pending >= len(self._engines) or not self.requests:
            first = self._random.random() if not self.requests else 1.0  # engines report at different times
            self._clock.at(now + REPORT_S * first, lambda: self._report(number))


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
