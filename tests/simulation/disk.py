"""A simulated disk of state files: it carries out calls late and in order, and fails where the scenario says so."""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from baton.actors.messages import Cleared, DiskReport, Loaded, Written
from baton.actors.storage.disk import StateFile
from baton.actors.tokens import Tokens, count, unpack
from baton.models.hash_definition import next_state
from tests.simulation.hash_device import GARBAGE, Copy, DeviceError, HashDevice


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the disk: write, read or delete the file of `salt` and `tokens`, or `clear` the folder."""

    how: str  # "write", "read", "delete" or "clear"
    key: int  # the copy's key in host memory; for "clear", the ticket
    salt: str
    tokens: Tokens


class SimulatedDisk:
    """The disk as the cache uses it. It compares every state written or read with the right one."""

    def __init__(
        self,
        device: HashDevice,
        size: Callable[[int], int],
        deliver: Callable[[DiskReport], None],
        duration: Callable[[], float] = lambda: 0.0,
        byte: float = 0.0,
    ) -> None:
        self.stored: dict[tuple[str, Tokens], Copy] = {}
        self.calls: deque[Call] = deque()
        self.bad_writes: set[int] = set()  # numbers of the writes that fail, counted from 1
        self.damaged_files: set[int] = set()  # numbers of the writes whose file is damaged, counted from 1
        self.now = 0.0
        self.bytes = 0  # the size of all files together
        self.counters: Counter[str] = Counter()
        self._device = device
        self._size = size
        self._deliver = deliver
        self._duration = duration  # draws how long a call takes
        self._byte = byte  # seconds that the disk reports for reading one byte
        self._damaged: set[tuple[str, Tokens]] = set()
        # Files whose last write failed or that were found damaged. The cache may still delete them.
        self._failed: set[tuple[str, Tokens]] = set()
        self._writes = 0
        self._due = 0.0

    # Calls of the cache

    def files(self) -> list[StateFile]:
        return [StateFile(salt, tokens, self._size(count(tokens))) for salt, tokens in self.stored]

    def write(self, key: int, salt: str, tokens: Tokens) -> None:
        self._enqueue(Call("write", key, salt, tokens))

    def read(self, key: int, salt: str, tokens: Tokens) -> None:
        self._enqueue(Call("read", key, salt, tokens))

    def delete(self, salt: str, tokens: Tokens) -> None:
        self._enqueue(Call("delete", 0, salt, tokens))

    def clear(self, ticket: int) -> None:
        self._enqueue(Call("clear", ticket, "", b""))

    # Execution

    @property
    def due(self) -> float | None:
        """Return when the oldest call is done.

        None if there is no call, or if it writes a copy that is not made yet.
        """
        if not self.calls or self.is_copy_under_way(self.calls[0]):
            return None
        return self._due

    def is_copy_under_way(self, call: Call) -> bool:
        """Return whether the call writes a copy that is not made yet: `Exported` may arrive before the copy."""
        return call.how == "write" and call.key in self._device.exporting

    def execute(self) -> None:
        call = self.calls.popleft()
        self._due = self.now + self._duration()
        match call.how:
            case "write":
                self._deliver(Written(call.key, self._write(call)))
            case "clear":
                self._deliver(Cleared(call.key))
            case "read":
                seconds = self._byte * self._size(count(call.tokens))
                self._deliver(Loaded(call.key, self._read(call), seconds))
            case _:
                self._delete(call)

    def reset(self, calls: int) -> None:
        """Carry out the first `calls` calls, and lose the rest, as a restart or a kill of the server does.

        The first lost call may have been a write in progress. It leaves no file, because a file is renamed when it is
        complete.
        """
        for call in list(self.calls)[:calls]:
            if call.how == "write" and call.key in self._device.vault:
                self._write(call)
            elif call.how == "delete":
                self._delete(call)
        self.counters["calls lost in a restart"] += len(self.calls) - calls
        self.calls.clear()

    def _enqueue(self, call: Call) -> None:
        if not self.calls:
            self._due = self.now + self._duration()
        self.calls.append(call)

    def _write(self, call: Call) -> str:
        """Write a file. Return "" or the error."""
        self._writes += 1
        self._failed.add((call.salt, call.tokens))
        if call.key in self._device.unmade:
            return "injected: the copy could not be made"
        if call.key not in self._device.vault:
            raise DeviceError(f"there is no copy {call.key} to be written")
        copy = self._device.vault[call.key]
        assert not copy.first, f"copy {call.key}, which lacks its first entries, is written to a file"
        check_copy(copy, call.tokens, self._device)
        if self._writes in self.bad_writes:
            self.counters["failed write"] += 1
            return "injected: no space left on the device"
        name = call.salt, call.tokens
        self._failed.discard(name)
        self.bytes += self._size(copy.position) if name not in self.stored else 0
        self.stored[name] = copy
        self._damaged.discard(name)
        if self._writes in self.damaged_files:
            self.stored[name] = replace(copy, state=copy.state ^ 1)
            self._damaged.add(name)
        self.counters["written file"] += 1
        return ""

    def _read(self, call: Call) -> str:
        """Read a file. Return "", or delete the damaged file and return the error."""
        name = call.salt, call.tokens
        if call.key in self._device.vault or call.key in self._device.exporting:
            raise DeviceError(f"a file is read over copy {call.key}")
        if name not in self.stored:
            raise DeviceError(f"there is no file of {unpack(call.tokens)} to be read")
        if self.is_damaged(name):
            self.counters["damaged file"] += 1
            self._delete(call)
            self._failed.add(name)
            return "injected: the checksum differs"
        self._device.vault[call.key] = self.stored[name]
        self.counters["read file"] += 1
        return ""

    def is_damaged(self, name: tuple[str, Tokens]) -> bool:
        return name in self._damaged

    def _delete(self, call: Call) -> None:
        name = call.salt, call.tokens
        if name in self._failed:
            return  # The cache asked for the deletion before it received the error about this file.
        if name not in self.stored:
            raise DeviceError(f"there is no file of {unpack(call.tokens)} to be deleted")
        del self.stored[name]
        self.bytes -= self._size(count(call.tokens))
        self._damaged.discard(name)
        self.counters["deleted file"] += 1


def check_copy(copy: Copy, tokens: Tokens, device: HashDevice) -> None:
    """Check that a copy holds the state after exactly these tokens, and the KV entries from its first on."""
    state, entries = 0, []
    for position, token in enumerate(unpack(tokens)):
        state = next_state(state, token, position)
        entries.append(state)
    right = Copy(state, tuple(entries[copy.first :]) if device.entries else (), len(entries), copy.first)
    assert copy == right, f"the copy of {unpack(tokens)} is {copy}, right is {right}"
    assert GARBAGE not in (copy.state, *copy.entries)
