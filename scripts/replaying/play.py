"""A workload played on a ring, and what came of it."""

import gc
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from random import Random

from baton.actors.actor import Send
from baton.actors.cache.actor import Cache
from baton.actors.cache.limits import TierLimits
from baton.actors.cache.pages import PagePool
from baton.actors.control import Speeds
from baton.actors.lease import Ledger
from baton.actors.requests import Request, Sampling, Stops
from baton.actors.scheduler.actor import Scheduler
from baton.actors.scheduler.plan import Limits
from baton.actors.tokens import pack
from scripts.replaying.bound import Past
from scripts.replaying.costs import Costs
from scripts.replaying.policies import Policy
from scripts.replaying.ring import Running, VirtualRing
from scripts.replaying.workloads import Answer, Arrival, Ask, Client, Workload

END = 0
MAX_TREE_UNITS = 1 << 22
EARLY = 64  # Arrivals drawn ahead of their time.


@dataclass
class Outcome:
    """Of all requests: units of their prompts, and of these the cached; seconds to the first token. The rest: counters
    of the ring, units that the device computed of prompts, virtual seconds until all was done, and those in which
    requests waited or ran.
    """

    requests: int = 0
    prompt: int = 0
    cached: int = 0
    by_salt: Counter[str] = field(default_factory=Counter)
    prompt_by_salt: Counter[str] = field(default_factory=Counter)
    first_tokens: list[float] = field(default_factory=list)
    computed: int = 0
    seconds: float = 0.0
    running: float = 0.0
    counters: Counter[str] = field(default_factory=Counter)

    @property
    def reused(self) -> float:
        return self.cached / max(self.prompt, 1)

    def count(self, running: Running, now: float) -> None:
        output, request = running.output, running.request
        assert output is not None and running.first_token is not None
        self.requests += 1
        self.prompt += request.prompt_len
        self.cached += output.hit.cached_tokens
        self.prompt_by_salt[request.salt] += request.prompt_len
        self.by_salt[request.salt] += output.hit.cached_tokens
        self.first_tokens.append(running.first_token - running.asked)
        self.seconds = now
        self.running += now - running.asked


class Player:
    """Sends what the clients ask, and the answers back to them."""

    def __init__(
        self, ring: VirtualRing, arrivals: Iterator[Arrival], limit: int, seed: int, past: Past | None
    ) -> None:
        self.outcome = Outcome()
        self._past = past
        self._ring, self._arrivals, self._limit = ring, arrivals, limit
        self._rng = Random(seed)
        self._asked = 0

    def play(self) -> Outcome:
        self._await()
        self._ring.run()
        ring, outcome = self._ring, self.outcome
        outcome.computed = ring.device.computed
        outcome.counters = ring.cache.counters + ring.scheduler.counters
        return outcome

    def _await(self) -> None:
        """The next arrivals; with the last of them those behind it."""
        some = list(islice(self._arrivals, EARLY))
        for arrival in some:
            self._ring.at(arrival.at, lambda client=arrival.client: self._go_on(client, None))  # type: ignore[misc]
        if len(some) == EARLY:
            self._ring.at(some[-1].at, self._await)

    def _go_on(self, client: Client, answer: Answer | None) -> None:
        if self._asked >= self._limit:
            return
        try:
            ask = next(client) if answer is None else client.send(answer)
        except StopIteration:
            return
        self._asked += 1
        id = str(self._asked)
        stops, answered = self._answer(ask)
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
        self._ring.at(self._ring.now + ask.pause, lambda: self._submit(client, request, answered))

    def _answer(self, ask: Ask) -> tuple[Stops, Answer]:
        """What comes back, and how it ends: one that is drawn with a token that no prompt goes on from."""
        if ask.said:
            return Stops(len(ask.said)), list(ask.said)
        drawn = [*(self._rng.getrandbits(31) | 1 for _ in range(ask.answer - 1)), END]
        return Stops(ask.answer + 8, token_ids=(END,)), drawn

    def _submit(self, client: Client, request: Request, answer: Answer) -> None:
        if self._past is not None:
            self._past.add(request.salt, request.tokens, pack(answer))

        def ended(running: Running) -> None:
            self.outcome.count(running, self._ring.now)
            self._go_on(client, answer)

        self._ring.submit(Running(request, answer, self._ring.now, ended=ended))


def make_ring(
    policy: Policy,
    slots: int,
    costs: Costs,
    max_running: int = 32,
    block: int = 1,
    tree: int = MAX_TREE_UNITS,
    copies: int = 0,
) -> VirtualRing:
    """block: the workload's. tree: how many units the cache knows at most. copies: what host memory holds."""
    ledger = Ledger(slots, lambda move: None, lambda violation: None)
    limits = Limits(
        max_running=min(max_running, slots), max_queue=1 << 20, step_tokens=2048 // costs.unit, min_saving=1
    )
    tiers = TierLimits(host_bytes=copies)  # A state is a byte.

    def make_cache(send: Send) -> Cache:
        waiting = 64 // costs.unit
        return Cache(send, ledger, PagePool(0, 1), tree, policy.order, worth_waiting=waiting, limits=tiers)

    ring = VirtualRing(costs, ledger, make_cache, lambda send: Scheduler(send, limits, policy.positions(block)))
    ring.cache.receive(Speeds(operation=costs.prefill, byte=costs.host))
    return ring


def play(workload: Workload, ring: VirtualRing, requests: int, seed: int, past: Past | None = None) -> Outcome:
    """past: told of every request, in order of arrival."""
    player = Player(ring, workload.draw(Random(seed), requests), requests, seed, past)
    gc.collect()  # The ring before hangs in a cycle. While one runs nothing does, and there is much to go through.
    gc.disable()
    try:
        return player.play()
    finally:
        gc.enable()
        ring.close()
