"""Commands about sessions and loans to peers. A command that cannot proceed waits for an event."""

from collections.abc import Callable, Hashable, Iterator
from enum import Enum, auto
from heapq import heapify, heappop, heappush
from itertools import count

from baton.actors.messages import Lend, Name, Suspend, Unname

Command = Name | Unname | Suspend | Lend
Entry = tuple[int, Command]  # the command's number in order of arrival, and the command


class Awaited(Enum):
    """Keys under which commands wait (see Commands), other than sessions and nodes."""

    ROOM = auto()  # free bytes in host memory, which the end of any copy, write or loan may bring


class Commands:
    """The queue of commands: carried out in order of arrival, except for commands that have to wait.

    A command waits under a key: the id of a session with an open turn, a node whose state or copy is lent or being
    copied, or Awaited.ROOM. When that has ended, `wake` is called with the key. So only commands that may succeed are
    tried again.
    """

    def __init__(self, carry_out: Callable[[Command], Hashable | None]) -> None:
        """carry_out: carries out a command and returns None, or returns the key under which the command has to wait."""
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

        The free bytes are often enough for one command only. `act` wakes the next command when the first found enough.
        """
        for entry in self._take(key, first_only=key is Awaited.ROOM):
            heappush(self._ready, entry)

    def take(self, key: Hashable) -> list[Command]:
        """Remove and return the commands that wait under this key."""
        return [command for _, command in self._take(key)]

    def withdraw(self, command: Command) -> None:
        """Remove a command that waits."""
        for key, entries in list(self._waiting.items()):
            others = [entry for entry in entries if entry[1] is not command]
            if len(others) < len(entries):
                heapify(others)
                self._waiting[key] = others
                if not others:
                    del self._waiting[key]
        self._ready = [entry for entry in self._ready if entry[1] is not command]
        heapify(self._ready)

    def act(self) -> None:
        """Try the commands that are ready."""
        while self._ready:
            entry = heappop(self._ready)
            key = self._carry_out(entry[1])
            if key is not None:
                heappush(self._waiting.setdefault(key, []), entry)
            if key is not Awaited.ROOM:
                # This command found enough host memory or needed none, so the next one that waits for it may succeed.
                self.wake(Awaited.ROOM)

    def _take(self, key: Hashable, first_only: bool = False) -> list[Entry]:
        entries = self._waiting.get(key, [])
        popped = [heappop(entries) for _ in range(min(len(entries), 1) if first_only else len(entries))]
        if not entries:
            self._waiting.pop(key, None)
        return popped
