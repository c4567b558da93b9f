"""A disk of files: its calls are carried out late, in order, and go wrong where the scenario says so."""

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
    """One call: `carry_out` writes, reads or deletes the file of `salt` and `tokens`."""

    how: str
    key: int
    salt: str
    tokens: Tokens


class SimulatedDisk:
    """due: when the oldest call is done, None if there is none, or it writes a copy that the stream has not made yet.

    What is written and what is read is compared with the right states. bad_writes and damaged_files: which writes fail,
    and which files are damaged as soon as they are written, counted from 1. byte: seconds that reading is said to take.
    """

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
        self.bad_writes: set[int] = set()
        self.damaged_files: set[int] = set()
        self.now = 0.0
        self.bytes = 0
        self.counters: Counter[str] = Counter()
        self._device = device
        self._size = size
        self._deliver = deliver
        self._duration = duration
        self._byte = byte
        self._damaged: set[tuple[str, Tokens]] = set()
        self._failed: set[tuple[str, Tokens]] = set()
        self._writes = 0
        self._due = 0.0

    # What the cache asks for

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
        if not self.calls or self.is_copy_under_way(self.calls[0]):
            return None
        return self._due

    def is_copy_under_way(self, call: Call) -> bool:
        """Exported says that the copy is on the stream; a write waits until it is made."""
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
        """The server is made anew, or killed and started again: of the calls under way so many were carried out.

        The next one was in the middle of it: a file that was being written has not got its name.
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
            return  # It was asked for before it was known that the write has failed, or that the file was damaged.
        if name not in self.stored:
            raise DeviceError(f"there is no file of {unpack(call.tokens)} to be deleted")
        del self.stored[name]
        self.bytes -= self._size(count(call.tokens))
        self._damaged.discard(name)
        self.counters["deleted file"] += 1


def check_copy(copy: Copy, tokens: Tokens, device: HashDevice) -> None:
    """A copy is the state behind exactly these tokens, and their entries."""
    state, entries = 0, []
    for position, token in enumerate(unpack(tokens)):
        state = next_state(state, token, position)
        entries.append(state)
    right = Copy(state, tuple(entries) if device.entries else (), len(entries))
    assert copy == right, f"the copy of {unpack(tokens)} is {copy}, right is {right}"
    assert GARBAGE not in (copy.state, *copy.entries)
