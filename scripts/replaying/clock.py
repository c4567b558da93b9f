"""Virtual time."""

from collections.abc import Callable
from heapq import heappop, heappush


class Clock:
    """The time of a replay in seconds, and the calls that are due at later times."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = 0

    def at(self, time: float, what: Callable[[], None]) -> None:
        """Schedule a call. Calls of one time are made in the order in which they were scheduled."""
        self._numbers += 1
        heappush(self._timers, (time, self._numbers, what))

    @property
    def pending(self) -> int:
        """How many calls are scheduled."""
        return len(self._timers)

    def run(self, settle: Callable[[], None]) -> None:
        """Run until no call is left. settle: called after the calls of each time."""
        while self._timers:
            self.now = max(self.now, self._timers[0][0])
            while self._timers and self._timers[0][0] <= self.now:
                heappop(self._timers)[2]()
            settle()
