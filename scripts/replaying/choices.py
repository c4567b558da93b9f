"""Rules by which a router chooses an engine for a request: Baton's, and two that others use."""

import json
from collections.abc import Callable, Sequence
from typing import Protocol

from baton.actors.cache.pages import PagePool
from baton.actors.cache.radix import RadixTree
from baton.actors.requests import Request
from baton.actors.runtime.digests import Digester
from baton.actors.runtime.watching import StateWatch
from baton.actors.tokens import Tokens, count, pack, unpack
from baton.api.events.rows import RowQueue
from baton.api.routing.asking import read_asking
from baton.api.routing.choice import Chosen, Engines
from baton.api.routing.index import StateIndex
from baton.api.routing.prompts import Chain, Chains
from scripts.replaying.ring import Running, VirtualRing

BYTES = 64  # bytes of a unit's text
BEAT = 5  # looks until an engine reports its load though none of its states has changed


class Choice(Protocol):
    """A rule. An engine is a number, from 0."""

    def choose(self, request: Request) -> int: ...

    def begun(self, running: Running) -> None:
        """Note that the first token has come."""

    def ended(self, running: Running) -> None:
        """Note the end of an answer."""

    def look(self) -> None:
        """Take in what the engines report. Called ten times a second."""


class InSeconds:
    """Baton's rule: the engine that would answer first. The router's own code chooses, from the same reports."""

    def __init__(self, rings: Sequence[VirtualRing]) -> None:
        self._rings = rings
        self._index = StateIndex()
        clock = rings[0].clock
        self._engines = Engines(self._index, lambda: clock.now)
        self._chains, self._digester = Chains(self._index), Digester()
        self._watches = [StateWatch(ring.cache, None, self._digester) for ring in rings]
        self._quiet = [BEAT] * len(rings)
        self._rows = [RowQueue() for _ in rings]
        self._asked: dict[str, tuple[Chain, Chosen]] = {}
        self.look()

    def choose(self, request: Request) -> int:
        chain = read_asking("/v1/chat/completions", body_of(request), request.salt.encode()).chain
        chosen = self._engines.choose(self._chains.demand(chain))
        assert chosen is not None
        self._chains.sent(chain, chosen.engine)
        self._asked[request.id] = chain, chosen
        return chosen.engine

    def begun(self, running: Running) -> None:
        self._engines.answered(self._asked[running.request.id][1].sent)

    def ended(self, running: Running) -> None:
        request, output = running.request, running.output
        assert output is not None
        tokens = request.tokens + pack(running.answer)
        digests = self._digester.extended(self._digester.beginning(request.salt), 0, tokens)
        length, end = request.prompt_len, count(tokens)
        positions = {output.hit.cached_tokens, output.hit.matched_tokens, length, end - 1, end}
        places = [(position, int(digests[position - 1])) for position in sorted(positions) if position]
        self._chains.learn(self._asked.pop(request.id)[0], length, places)

    def look(self) -> None:
        for number, (ring, watch) in enumerate(zip(self._rings, self._watches, strict=True)):
            changed = watch.look()
            rows, ended = len(ring.scheduler.state.rows), ring.scheduler.state.ended
            self._rows[number].look(ring.clock.now, rows, len(ring.requests) - rows, ended)
            self._quiet[number] += 1
            if changed or self._quiet[number] >= BEAT:
                self._quiet[number] = 0
                present = changed & watch.states.keys()
                self._index.add(number, present)
                self._index.remove(number, changed - present)
                costs = ring.device.costs
                queue = max(ring.waiting * costs.prefill, self._rows[number].seconds)
                self._engines.report(number, queue, costs.prefill, costs.step, rows, ring.slots)


def body_of(request: Request) -> bytes:
    """Return a request of a client with this prompt, as chat completions."""
    ids, begin, messages = unpack(request.tokens), 0, []
    for end in sorted({*request.message_ends, len(ids)}):
        text = "".join(f"{unit:0{BYTES}x}" for unit in ids[begin:end])
        messages.append({"role": "user", "content": text})
        begin = end
    return json.dumps({"messages": messages}).encode()


class RoundRobin:
    """One engine after the other."""

    def __init__(self, rings: Sequence[VirtualRing]) -> None:
        self._engines, self._next = len(rings), 0

    def choose(self, request: Request) -> int:
        self._next += 1
        return self._next % self._engines

    def begun(self, running: Running) -> None: ...

    def ended(self, running: Running) -> None: ...

    def look(self) -> None: ...


class Thresholds:
    """The rule of SGLang's router with its default thresholds (`cache_aware`, sgl-router 0.2).

    If the engines' loads differ by more than LOADS requests and by more than RATIO, the one with the least load gets
    the request. Otherwise it is the engine that has been sent the longest beginning of the prompt, if that is more than
    SHARE of it, and else the one that has been sent the least text. The router keeps a tree of all prompts that it has
    sent to each engine, and knows of no eviction there.
    """

    LOADS, RATIO, SHARE = 64, 1.5, 0.3

    def __init__(self, rings: Sequence[VirtualRing]) -> None:
        self._trees: list[RadixTree[None]] = [RadixTree(PagePool(0, 1)) for _ in rings]
        self._loads = [0] * len(rings)
        self._engine: dict[str, int] = {}

    def choose(self, request: Request) -> int:
        engine = self._choose(request.salt, request.tokens)
        tree = self._trees[engine]
        tree.insert(tree.match(request.salt, b"", 0).node, request.tokens, [])
        self._loads[engine] += 1
        self._engine[request.id] = engine
        return engine

    def _choose(self, salt: str, prompt: Tokens) -> int:
        numbers, loads = range(len(self._trees)), self._loads
        if max(loads) - min(loads) > self.LOADS and max(loads) > self.RATIO * min(loads):
            return min(numbers, key=lambda number: loads[number])
        known = [tree.match(salt, prompt, count(prompt)).tokens for tree in self._trees]
        best = max(numbers, key=lambda number: known[number])
        if known[best] > self.SHARE * count(prompt):
            return best
        return min(numbers, key=lambda number: self._trees[number].tokens)

    def begun(self, running: Running) -> None: ...

    def ended(self, running: Running) -> None:
        self._loads[self._engine.pop(running.request.id)] -= 1

    def look(self) -> None: ...


CHOICES: dict[str, Callable[[Sequence[VirtualRing]], Choice]] = {
    "in seconds": InSeconds,
    "thresholds": Thresholds,
    "round robin": RoundRobin,
}
