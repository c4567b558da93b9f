"""Commands about sessions: each that has to wait is tried again when what it waits for has come."""

from collections.abc import Callable, Hashable, Iterator
from enum import Enum, auto
from heapq import heappop, heappush
from itertools import count

from baton.actors.messages import Name, Suspend, Unname

Command = Name | Unname | Suspend
Entry = tuple[int, Command]  # with the order of arrival


class Awaited(Enum):
    """Keys under which commands wait that are neither a session nor a node."""

    ROOM = auto()  # room in host memory, which the end of something under way may make


class Commands:
    """Name, Unname and Suspend, carried out in order of arrival, except those that have to wait.

    A command waits under a key: the name of a session whose turn is open, a node with which something is under way, or
    Awaited.ROOM. `wake` is called with the key when that has changed, so only commands that may succeed are tried.
    """

    def __init__(self, carry_out: Callable[[Command], Hashable | None]) -> None:
        """carry_out: carries out a command and returns None, or returns the key that it has to wait under."""
        self._carry_out = carry_out
        self._ready: list[Entry] = []
        self._waiting: dict[Hashable, list[Entry]] = {}
        self._arrivals = count()

    def __iter__(self) -> Iterator[Command]:
        """Yield all commands that are not carried out yet."""
        for entries in (self._ready, *self._waiting.values()):
            yield from (command for _, command in entries)

    @property
    def idle(self) -> bool:
        return not self._ready and not self._waiting

    def add(self, command: Command) -> None:
        heappush(self._ready, (next(self._arrivals), command))

    def wake(self, key: Hashable) -> None:
        """Make the commands under this key ready to be tried again; under Awaited.ROOM only the first of them.

        The room is often enough for one command only. `act` wakes the next one when the first got what it needs.
        """
        for entry in self._take(key, first_only=key is Awaited.ROOM):
            heappush(self._ready, entry)

    def take(self, key: Hashable) -> list[Command]:
        """Remove and return the commands that wait under this key."""
        return [command for _, command in self._take(key)]

    def act(self) -> None:
        """Try the commands that are ready."""
        while self._ready:
            entry = heappop(self._ready)
            key = self._carry_out(entry[1])
            if key is not None:
                heappush(self._waiting.setdefault(key, []), entry)
            if key is not Awaited.ROOM:
                # This command found room, or needed none: the next one that waits for room may find some too.
                self.wake(Awaited.ROOM)

    def _take(self, key: Hashable, first_only: bool = False) -> list[Entry]:
        entries = self._waiting.get(key, [])
        popped = [heappop(entries) for _ in range(min(len(entries), 1) if first_only else len(entries))]
        if not entries:
            self._waiting.pop(key, None)
        return popped
