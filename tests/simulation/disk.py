"""A simulated disk of state files: its calls are carried out late, in order, and fail where the scenario says so."""

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
    """A write, read or deletion of the file of `salt` and `tokens`, or a `clear`."""

    how: str  # "write", "read", "delete" or "clear"
    key: int  # the copy's key in host memory; for "clear" the ticket
    salt: str
    tokens: Tokens


class SimulatedDisk:
    """The disk as the cache sees it. Everything that is written or read is compared with the right states."""

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
        self.bad_writes: set[int] = set()  # which writes fail, counted from 1
        self.damaged_files: set[int] = set()  # which files are damaged as soon as they are written, counted from 1
        self.now = 0.0
        self.bytes = 0  # the size of all files
        self.counters: Counter[str] = Counter()
        self._device = device
        self._size = size
        self._deliver = deliver
        self._duration = duration  # draws how long a call takes
        self._byte = byte  # seconds that reading one byte is reported to take
        self._damaged: set[tuple[str, Tokens]] = set()
        # Files whose last write failed, or that were found damaged: deleting them again is no error.
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
        """When the oldest call is done; None if there is none, or if the copy that it writes is not made yet."""
        if not self.calls or self.is_copy_under_way(self.calls[0]):
            return None
        return self._due

    def is_copy_under_way(self, call: Call) -> bool:
        """Return whether this call writes a copy that is still on the stream: `Exported` may precede the copy."""
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
        """Restart or kill the server: the first `calls` of the calls under way are carried out, and the rest are lost.

        The next one was interrupted: a file that was being written was not renamed, so it does not exist.
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
        """Write a file and return an empty text, or return an error."""
        self._writes += 1
        self._failed.add((call.salt, call.tokens))
        if call.key in self._device.unmade:
            return "injected: the copy could not be made"
        if call.key not in self._device.vault:
            raise DeviceError(f"there is no copy {call.key} to be written")
        copy = self._device.vault[call.key]
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
        """Read a file and return an empty text, or delete it and return an error if it is damaged."""
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
            return  # The cache asked for it before it knew that the write failed, or that the file was damaged.
        if name not in self.stored:
            raise DeviceError(f"there is no file of {unpack(call.tokens)} to be deleted")
        del self.stored[name]
        self.bytes -= self._size(count(call.tokens))
        self._damaged.discard(name)
        self.counters["deleted file"] += 1


def check_copy(copy: Copy, tokens: Tokens, device: HashDevice) -> None:
    """Check that a copy is the state after exactly these tokens, with their KV entries."""
    state, entries = 0, []
    for position, token in enumerate(unpack(tokens)):
        state = next_state(state, token, position)
        entries.append(state)
    right = Copy(state, tuple(entries) if device.entries else (), len(entries))
    assert copy == right, f"the copy of {unpack(tokens)} is {copy}, right is {right}"
    assert GARBAGE not in (copy.state, *copy.entries)
