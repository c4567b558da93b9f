"""The choice of an engine for a request: the one that would answer first, in seconds."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton.api.routing.index import Engine, StateIndex

UNMEASURED_S = 1e-4
"""Seconds a prompt token on an engine that has not measured it yet: less than that of most, so that it is tried."""
PAUSE_S = 30.0  # between two requests of a chat, typically; reuse changes by at most 0.02 with values from 10 to 100
HALF_S = 60.0  # the time in which an idle engine's speeds count half as much
RECENT_S = 60.0  # the time over which an engine's requests are counted

Place = tuple[int, int]  # a position in a prompt, and the digest of the tokens before it

QUEUE, TOKEN, STEP, ROWS, ROOM, MEASURED_TOKEN, MEASURED_STEP, RECENT = range(8)
"""The rows of the table of loads, which has a column for each engine: seconds of the queue, of a token, and of a step,
as they count; the numbers of rows, and of states that the engine can keep; seconds of a token and of a step, as they
were measured; the number of requests that it got in the last RECENT_S seconds."""


@dataclass(frozen=True, slots=True)
class Demand:
    """A request's prompt, as far as a router knows it."""

    tokens: int  # its length, an estimate
    places: Sequence[Place]  # where states of its beginning may lie, the longest beginning first
    home: Engine | None = None  # the engine that got the latest request of this chat
    coming: int = 0  # tokens of the prompt that `home` computes, or has computed, for a request that has not ended


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
    step of its rows + what a further chat will cost there later. Requests that were sent since the engine last reported
    its load count at once.
    """

    def __init__(self, index: StateIndex, clock: Callable[[], float] = time.monotonic) -> None:
        self._index, self._clock = index, clock
        self._numbers: dict[Engine, int] = {}  # the column of each engine in the loads
        self._engines = list[Engine]()
        self._loads: NDArray[np.float64] = np.zeros((RECENT + 1, 0))
        self._counted = clock()  # when the recent requests were last counted
        self._sent: dict[Engine, list[Sent]] = {}
        self._busy: dict[Engine, float] = {}  # when each engine was last seen with requests

    def report(self, engine: Engine, queue: float, token: float, step: float, rows: int, slots: int) -> None:
        """Note the load of an engine that takes requests, in seconds, and its rows and slots. An engine may be new."""
        at = self._numbers.get(engine)
        if at is None:
            at = self._numbers[engine] = len(self._engines)
            self._engines.append(engine)
            self._loads = np.hstack((self._loads, np.zeros((RECENT + 1, 1))))
        room = max(slots, self._index.count(engine), 1)  # states may also lie below the slots
        token = token or UNMEASURED_S
        self._loads[:RECENT, at] = queue, *self._believed(engine, token, step, rows > 0), rows, room, token, step
        self._sent[engine] = []

    def remove(self, engine: Engine) -> None:
        """Remove an engine that takes no further requests."""
        at = self._numbers.pop(engine, None)
        if at is None:
            return
        last = self._engines.pop()
        if last != engine:
            self._engines[at], self._numbers[last] = last, at
        self._loads[:, at] = self._loads[:, -1]
        self._loads = np.ascontiguousarray(self._loads[:, :-1])
        del self._sent[engine], self._busy[engine]

    def choose(self, demand: Demand, but: Iterable[Engine] = ()) -> Chosen | None:
        """Return the engine that would answer first, and count the request there; None if no engine takes requests.

        The one with the fewest rows is chosen among equal ones. but: engines that are left out.
        """
        if not self._engines:
            return None
        cached, loads = self._cached(demand), self._loads
        uncached = np.maximum(demand.tokens - cached, 1.0)
        costs = self._later(demand)
        costs += loads[QUEUE]
        costs += loads[STEP]
        costs += uncached * loads[TOKEN]
        for engine in but:
            if engine in self._numbers:
                costs[self._numbers[engine]] = np.inf
        least = costs.min()
        if least == np.inf:
            return None
        [equal] = np.nonzero(costs == least)
        at = int(equal[0] if len(equal) == 1 else equal[loads[ROWS, equal].argmin()])
        sent = Sent(self._engines[at], float(uncached[at] * loads[TOKEN, at]))
        loads[QUEUE, at] += sent.seconds
        loads[ROWS, at] += 1
        loads[RECENT, at] += 1
        self._busy[sent.engine] = self._counted
        self._sent[sent.engine].append(sent)
        return Chosen(sent.engine, int(cached[at]), sent)

    def answered(self, sent: Sent) -> None:
        """Note that the first token of a request has come, or that it has failed."""
        waiting = self._sent.get(sent.engine, [])
        if any(each is sent for each in waiting):  # otherwise a report has it counted already
            waiting[:] = [each for each in waiting if each is not sent]
            self._loads[QUEUE, self._numbers[sent.engine]] -= sent.seconds

    def _believed(self, engine: Engine, token: float, step: float, busy: bool) -> tuple[float, float]:
        """Return the speeds with which an engine counts.

        The speeds of an idle engine halve in each HALF_S seconds, down to the fastest engine's. So an engine that was
        slow, or was measured wrongly, gets a request some time later, and is measured again.
        """
        now = self._clock()
        since = self._busy.setdefault(engine, now)
        if busy:
            self._busy[engine] = now
            return token, step
        if now == since:
            return token, step
        share, loads = 0.5 ** ((now - since) / HALF_S), self._loads
        floors = min(token, loads[MEASURED_TOKEN].min()), min(step, loads[MEASURED_STEP].min())
        return max(token * share, floors[0]), max(step * share, floors[1])

    def _cached(self, demand: Demand) -> NDArray[np.float64]:
        """Return how many tokens of a prompt each engine has, or will have when it comes to the request."""
        cached, numbers = np.zeros(len(self._engines)), self._numbers
        for position, digest in reversed(demand.places):
            holders = [numbers[engine] for engine in self._index.engines(digest) if engine in numbers]
            if holders:
                cached[holders] = position
        if demand.coming and demand.home in self._numbers:
            at = self._numbers[demand.home]
            cached[at] = max(cached[at], demand.coming)
        return cached

    def _later(self, demand: Demand) -> NDArray[np.float64]:
        """Return the seconds that a further chat will cost each engine later.

        Two states compete for the room of one then, so two prompts will be computed again if the engine's states are
        replaced before the chat goes on. That takes room ÷ (requests a second) seconds. The chance that a pause is
        longer than a time t is taken as PAUSE_S ÷ (PAUSE_S + t), a Lomax distribution. A chat is not new at its home.
        """
        now, loads = self._clock(), self._loads
        loads[RECENT] *= math.exp((self._counted - now) / RECENT_S)
        self._counted = now
        arrivals = loads[RECENT] * (PAUSE_S / RECENT_S)  # in a pause
        seconds: NDArray[np.float64] = arrivals / (arrivals + loads[ROOM])
        seconds *= loads[TOKEN]
        seconds *= 2 * demand.tokens
        if demand.home in self._numbers:
            seconds[self._numbers[demand.home]] = 0.0
        return seconds
