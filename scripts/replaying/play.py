"""Play a workload on a virtual ring, and count the outcome."""

import gc
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from random import Random
from typing import Protocol

from baton.actors.actor import Send
from baton.actors.cache.actor import Cache
from baton.actors.cache.below.assembly import make_cache as cache_with_tiers
from baton.actors.cache.below.limits import TierLimits
from baton.actors.cache.pages import PagePool
from baton.actors.control import Speeds
from baton.actors.lease import Ledger
from baton.actors.requests import Request, Sampling, Stops
from baton.actors.scheduler.actor import Scheduler
from baton.actors.scheduler.state import Limits
from baton.actors.tokens import pack
from scripts.replaying.bound import Past
from scripts.replaying.clock import Clock
from scripts.replaying.costs import Costs
from scripts.replaying.policies import Policy
from scripts.replaying.ring import Running, VirtualRing
from scripts.replaying.workloads import Answer, Arrival, Ask, Client, Workload

END = 0  # the unit that ends an answer; no prompt contains it
MAX_TREE_UNITS = 1 << 22
EARLY = 64  # number of arrivals that are drawn together, ahead of their time


@dataclass
class Outcome:
    """The counts of all requests. Seconds are virtual."""

    requests: int = 0
    prompt: int = 0  # units of prompts
    cached: int = 0  # units of prompts that were found in the cache
    by_salt: Counter[str] = field(default_factory=Counter)  # units found in the cache, by salt
    prompt_by_salt: Counter[str] = field(default_factory=Counter)  # units of prompts, by salt
    first_tokens: list[float] = field(default_factory=list)  # seconds to first token of each request
    computed: int = 0  # units of prompts that the device computed
    seconds: float = 0.0  # time until all requests have ended
    running: float = 0.0  # time from submission to end, summed over all requests
    counters: Counter[str] = field(default_factory=Counter)  # counters of the cache and the scheduler

    @property
    def reused(self) -> float:
        """Share of the prompts' units that was found in the cache."""
        return self.cached / max(self.prompt, 1)

    def count(self, running: Running, now: float) -> None:
        """Add a request that has ended."""
        output, request = running.output, running.request
        assert output is not None and running.first_token is not None
        self.requests += 1
        self.prompt += request.prompt_len
        self.cached += output.hit.cached_tokens
        self.prompt_by_salt[request.salt] += request.prompt_len
        self.by_salt[request.salt] += output.hit.cached_tokens
        self.first_tokens.append(running.first_token - running.submitted)
        self.seconds = now
        self.running += now - running.submitted


class VirtualServer(Protocol):
    """A server in virtual time: one engine, or several with a router."""

    clock: Clock

    @property
    def computed(self) -> int: ...

    @property
    def counters(self) -> Counter[str]: ...

    def submit(self, running: Running) -> None: ...

    def run(self) -> None: ...

    def close(self) -> None: ...


class Player:
    """A player of a workload: submits the clients' requests at their times, and sends each client its answers."""

    def __init__(
        self, ring: VirtualServer, arrivals: Iterator[Arrival], limit: int, seed: int, past: Past | None
    ) -> None:
        self.outcome = Outcome()
        self._past = past
        self._ring, self._arrivals, self._limit = ring, arrivals, limit
        self._rng = Random(seed)
        self._submitted = 0

    def play(self) -> Outcome:
        """Run until all clients have ended, or `limit` requests have been submitted; return the outcome."""
        self._schedule_arrivals()
        self._ring.run()
        ring, outcome = self._ring, self.outcome
        outcome.computed, outcome.counters = ring.computed, ring.counters
        return outcome

    def _schedule_arrivals(self) -> None:
        """Schedule the next arrivals, and a call of this function at the last of these arrivals."""
        some = list(islice(self._arrivals, EARLY))
        for arrival in some:
            self._ring.clock.at(arrival.at, lambda client=arrival.client: self._continue(client, None))  # type: ignore[misc]
        if len(some) == EARLY:
            self._ring.clock.at(some[-1].at, self._schedule_arrivals)

    def _continue(self, client: Client, answer: Answer | None) -> None:
        """Send a client the answer to its last request, if any, and schedule the client's next request."""
        if self._submitted >= self._limit:
            return
        try:
            ask = next(client) if answer is None else client.send(answer)
        except StopIteration:
            return
        self._submitted += 1
        id = str(self._submitted)
        stops, answer = self._answer(ask)
        request = Request(
            id,
            pack(ask.tokens),
            len(ask.tokens),
            Sampling(temperature=0.0),
            stops,
            salt=ask.salt,
            message_ends=ask.ends,
            flow=ask.salt or id,
        )
        self._ring.clock.at(self._ring.clock.now + ask.pause, lambda: self._submit(client, request, answer))

    def _answer(self, ask: Ask) -> tuple[Stops, Answer]:
        """Return the stop condition of a request, and its answer: the recorded answer, or random units and END."""
        if ask.known_answer:
            return Stops(len(ask.known_answer)), list(ask.known_answer)
        drawn = [*(self._rng.getrandbits(31) | 1 for _ in range(ask.answer - 1)), END]
        return Stops(ask.answer + 8, token_ids=(END,)), drawn

    def _submit(self, client: Client, request: Request, answer: Answer) -> None:
        if self._past is not None:
            self._past.add(request.salt, request.tokens, pack(answer))

        def ended(running: Running) -> None:
            self.outcome.count(running, self._ring.clock.now)
            self._continue(client, answer)

        self._ring.submit(Running(request, answer, self._ring.clock.now, ended=ended))


def make_ring(
    policy: Policy,
    slots: int,
    costs: Costs,
    max_running: int = 32,
    block: int = 1,
    tree: int = MAX_TREE_UNITS,
    copies: int = 0,
    clock: Clock | None = None,
) -> VirtualRing:
    """Make a ring for a policy.

    block: units of a block of the workload. tree: capacity of the radix tree, in units.
    copies: number of copies in host memory. clock: that of several rings; None: its own.
    """
    ledger = Ledger(slots, lambda move: None, lambda violation: None)
    limits = Limits(
        max_running=min(max_running, slots), max_queue=1 << 20, step_tokens=2048 // costs.unit, min_saving=1
    )
    tiers = TierLimits(host_bytes=copies)  # a state counts as one byte

    def make_cache(send: Send) -> Cache:
        waiting = 64 // costs.unit
        pages = PagePool(0, 1)
        return cache_with_tiers(
            send, ledger, pages, policy.order, limits=tiers, max_tree_tokens=tree, worth_waiting=waiting
        )

    ring = VirtualRing(
        clock or Clock(), costs, ledger, make_cache, lambda send: Scheduler(send, limits, policy.positions(block))
    )
    ring.cache.receive(Speeds(operation=costs.prefill, byte=costs.host))
    return ring


def play(workload: Workload, ring: VirtualServer, requests: int, seed: int, past: Past | None = None) -> Outcome:
    """Play a workload on a ring, then close the ring. `past` gets every request, in order of arrival."""
    player = Player(ring, workload.draw(Random(seed), requests), requests, seed, past)
    # A previous ring is part of a reference cycle, so free it now. A running ring makes no cycles, and has so many
    # objects that garbage collections would be slow.
    gc.collect()
    gc.disable()
    try:
        return player.play()
    finally:
        gc.enable()
        ring.close()
