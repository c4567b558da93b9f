"""Commands about sessions that may have to wait: each is tried again when what it waits for has come."""

from collections.abc import Callable, Hashable, Iterator
from enum import Enum, auto
from heapq import heappop, heappush
from itertools import count

from baton.actors.messages import Name, Suspend, Unname

Command = Name | Unname | Suspend
Entry = tuple[int, Command]


class Awaited(Enum):
    """ROOM: for room in host memory, which what is under way may make."""

    ROOM = auto()


class Commands:
    """Name, Unname and Suspend, carried out in order of arrival as far as nothing is in the way.

    carry_out: does it and returns None, or says what it waits for: a session whose turn has to end, a node with which
    something is under way, or Awaited.ROOM. Whoever brings that calls `wake`.
    """

    def __init__(self, carry_out: Callable[[Command], Hashable | None]) -> None:
        self._carry_out = carry_out
        self._ready: list[Entry] = []
        self._waiting: dict[Hashable, list[Entry]] = {}
        self._arrivals = count()

    def __iter__(self) -> Iterator[Command]:
        """All that are not carried out."""
        for entries in (self._ready, *self._waiting.values()):
            yield from (command for _, command in entries)

    @property
    def idle(self) -> bool:
        return not self._ready and not self._waiting

    def add(self, command: Command) -> None:
        heappush(self._ready, (next(self._arrivals), command))

    def wake(self, key: Hashable) -> None:
        """What was waited for has come; of those that wait for room the first tries it, and then the next."""
        for entry in self._take(key, first_only=key is Awaited.ROOM):
            heappush(self._ready, entry)

    def take(self, key: Hashable) -> list[Command]:
        """Those that wait for this and no longer are to."""
        return [command for _, command in self._take(key)]

    def act(self) -> None:
        while self._ready:
            entry = heappop(self._ready)
            key = self._carry_out(entry[1])
            if key is not None:
                heappush(self._waiting.setdefault(key, []), entry)
            if key is not Awaited.ROOM:
                self.wake(Awaited.ROOM)

    def _take(self, key: Hashable, first_only: bool = False) -> list[Entry]:
        entries = self._waiting.get(key, [])
        taken = [heappop(entries) for _ in range(min(len(entries), 1) if first_only else len(entries))]
        if not entries:
            self._waiting.pop(key, None)
        return taken
