"""The choice of the engine that would answer a request first, by estimates in seconds."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton.api.routing.index import Engine, StateIndex

UNMEASURED_S = 1e-4
"""Seconds per prompt token that are assumed for an engine without measurements: few, so that the engine is tried."""
PAUSE_S = 30.0  # typical pause between a chat's requests; reuse differs by at most 0.02 between 10 and 100
HALF_S = 60.0  # an idle engine's assumed seconds per token and step halve in this time, so that it is tried again
RECENT_S = 60.0  # time constant of the decaying count of an engine's recent requests

Place = tuple[int, int]  # a position in a prompt, and the digest of the tokens before it

QUEUE, TOKEN, STEP, ROWS, ROOM, MEASURED_TOKEN, MEASURED_STEP, RECENT = range(8)
"""The rows of the table of loads, which has a column for each engine.

QUEUE, TOKEN, STEP: seconds of its queue, per prompt token, and per step, as they are used in the choice. ROWS: running
requests. ROOM: states that it can keep. MEASURED_TOKEN, MEASURED_STEP: the seconds that it has reported. RECENT: number
of its requests in the last RECENT_S seconds.
"""


@dataclass(frozen=True, slots=True)
class Demand:
    """The knowledge that a router has of a request's prompt."""

    tokens: int  # estimated length
    places: Sequence[Place]  # places of states that the prompt may resume from, the highest position first
    home: Engine | None = None  # the engine that got the latest request of this chat
    coming: int = 0  # tokens of the prompt that `home` computes, or has computed, for a request that has not ended


@dataclass(slots=True)
class Sent:
    """A request that was sent to an engine, and that is not answered yet."""

    engine: Engine
    seconds: float  # time to compute its prompt


@dataclass(frozen=True, slots=True)
class Chosen:
    """The engine for a request."""

    engine: Engine
    cached: int  # tokens of the prompt that the engine is expected to have
    sent: Sent


class Engines:
    """The load of all engines, and the choice among those that take requests.

    The cost of a request on an engine is its uncached tokens × the engine's seconds per token + the engine's queue +
    one step + the later cost of one more chat (`_later`). Requests that were sent since the engine's last report are
    added to its load.
    """

    def __init__(self, index: StateIndex, clock: Callable[[], float] = time.monotonic) -> None:
        self._index, self._clock = index, clock
        self._numbers: dict[Engine, int] = {}  # each engine's column in the loads
        self._engines = list[Engine]()  # the engine of each column
        self._loads: NDArray[np.float64] = np.zeros((RECENT + 1, 0))
        self._counted = clock()  # when the counts of recent requests were last decayed
        self._sent: dict[Engine, list[Sent]] = {}  # the requests that were added to each engine's load
        self._busy: dict[Engine, float] = {}  # when each engine was last seen with requests

    def report(self, engine: Engine, queue: float, token: float, step: float, rows: int, slots: int) -> None:
        """Set the load of an engine that takes requests. An unknown engine is added.

        queue, token, step: seconds of its queue, per prompt token, and per step
        rows, slots: numbers of its running requests and of its slots
        """
        at = self._numbers.get(engine)
        if at is None:
            at = self._numbers[engine] = len(self._engines)
            self._engines.append(engine)
            self._loads = np.hstack((self._loads, np.zeros((RECENT + 1, 1))))
        room = max(slots, self._index.count(engine), 1)  # states may also be in host memory or on disk
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
        """Return the engine that would answer first, and add the request to its load; None if no engine takes requests.

        If several have the same cost, take the one with the fewest rows. but: engines that are left out.
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
        """Note that a request has been answered or has failed: take it off the engine's queue."""
        waiting = self._sent.get(sent.engine, [])
        if any(each is sent for each in waiting):  # Otherwise a later report has replaced the queue.
            waiting[:] = [each for each in waiting if each is not sent]
            self._loads[QUEUE, self._numbers[sent.engine]] -= sent.seconds

    def _believed(self, engine: Engine, token: float, step: float, busy: bool) -> tuple[float, float]:
        """Return the seconds per token and per step for the choice. token, step: as the engine reports them.

        While an engine is idle its seconds halve every HALF_S seconds, down to the fastest engine's. So an engine that
        was slow, or was measured wrongly, gets a request after some time, and is measured again.
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
        """Return how many tokens of a prompt are cached on each engine, or will be when it begins with the request."""
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
        """Return the seconds that one more chat will cost each engine later; 0 for the chat's home, which has it.

        One more state competes for the engine's room. If all its states are replaced before the chat continues, two
        prompts have to be computed again: the chat's, and that of the chat whose state it has displaced. Replacing all
        states takes t = room ÷ (requests per second) seconds. The probability that a pause is longer than t is taken as
        PAUSE_S ÷ (PAUSE_S + t), a Lomax distribution.
        """
        now, loads = self._clock(), self._loads
        loads[RECENT] *= math.exp((self._counted - now) / RECENT_S)
        self._counted = now
        arrivals = loads[RECENT] * (PAUSE_S / RECENT_S)  # requests during a pause of PAUSE_S
        seconds: NDArray[np.float64] = arrivals / (arrivals + loads[ROOM])
        seconds *= loads[TOKEN]
        seconds *= 2 * demand.tokens
        if demand.home in self._numbers:
            seconds[self._numbers[demand.home]] = 0.0
        return seconds
