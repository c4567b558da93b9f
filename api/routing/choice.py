"""The choice of an engine for a request: the one that would answer first, in seconds."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton.api.routing.index import Engine, StateIndex

UNMEASURED_S = 1e-4
"""Seconds a prompt token on an engine that has not measured it yet: less than that of most, so that it is tried."""

Place = tuple[int, int]  # a position in a prompt, and the digest of the tokens before it


@dataclass(frozen=True, slots=True)
class Demand:
    """A request's prompt, as far as a router knows it."""

    tokens: int  # its length, an estimate
    places: Sequence[Place]  # where states of its beginning may lie, the longest beginning first


@dataclass(slots=True)
class Sent:
    """A request that was sent to an engine, and whose first token has not come yet."""

    engine: Engine
    seconds: float  # that computing its prompt takes


@dataclass(frozen=True, slots=True)
class Chosen:
    """The engine for a request."""

    engine: Engine
    cached: int  # tokens of the prompt that the engine is expected to have
    sent: Sent


class Engines:
    """The load of all engines, and the choice among those that take requests.

    The cost of a request on an engine is its uncached tokens × the engine's seconds a token + the engine's queue + a
    step of its rows. Requests that were sent since the engine last reported its load count at once.
    """

    def __init__(self, index: StateIndex) -> None:
        self._index = index
        self._numbers: dict[Engine, int] = {}  # the place of each engine in the arrays
        self._engines = list[Engine]()
        self._queue, self._token, self._step = (np.zeros(0) for _ in range(3))
        self._rows: NDArray[np.int64] = np.zeros(0, np.int64)
        self._sent: dict[Engine, list[Sent]] = {}

    def report(self, engine: Engine, queue: float, token: float, step: float, rows: int) -> None:
        """Note the load of an engine that takes requests, in seconds, and its rows. An engine may be new."""
        at = self._numbers.get(engine)
        if at is None:
            at = self._numbers[engine] = len(self._engines)
            self._engines.append(engine)
            self._queue, self._token, self._step = (
                np.append(values, 0.0) for values in (self._queue, self._token, self._step)
            )
            self._rows = np.append(self._rows, 0)
        self._queue[at], self._token[at], self._step[at], self._rows[at] = queue, token or UNMEASURED_S, step, rows
        self._sent[engine] = []

    def remove(self, engine: Engine) -> None:
        """Remove an engine that takes no further requests."""
        at = self._numbers.pop(engine, None)
        if at is None:
            return
        last = self._engines.pop()
        if last != engine:
            self._engines[at], self._numbers[last] = last, at
        for values in (self._queue, self._token, self._step, self._rows):
            values[at] = values[-1]
        self._queue, self._token, self._step, self._rows = (
            self._queue[:-1], self._token[:-1], self._step[:-1], self._rows[:-1]
        )  # fmt: skip
        del self._sent[engine]

    def choose(self, demand: Demand, but: Iterable[Engine] = ()) -> Chosen | None:
        """Return the engine that would answer first, and count the request there; None if no engine takes requests.

        The one with the fewest rows is chosen among equal ones. but: engines that are left out.
        """
        if not self._engines:
            return None
        cached = np.zeros(len(self._engines))
        for position, digest in reversed(demand.places):
            for engine in self._index.engines(digest):
                if engine in self._numbers:
                    cached[self._numbers[engine]] = position
        uncached = np.maximum(demand.tokens - cached, 1.0)
        costs = self._queue + uncached * self._token + self._step
        for engine in but:
            if engine in self._numbers:
                costs[self._numbers[engine]] = np.inf
        at = int(np.lexsort((self._rows, costs))[0])
        if costs[at] == np.inf:
            return None
        sent = Sent(self._engines[at], float(uncached[at] * self._token[at]))
        self._count(at, sent)
        return Chosen(sent.engine, int(cached[at]), sent)

    def _count(self, at: int, sent: Sent) -> None:
        self._queue[at] += sent.seconds
        self._rows[at] += 1
        self._sent[sent.engine].append(sent)

    def answered(self, sent: Sent) -> None:
        """Note that the first token of a request has come, or that it has failed."""
        waiting = self._sent.get(sent.engine, [])
        if any(each is sent for each in waiting):  # otherwise a report has it counted already
            waiting[:] = [each for each in waiting if each is not sent]
            self._queue[self._numbers[sent.engine]] -= sent.seconds
