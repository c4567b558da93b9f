"""The seam to the disk: what the cache asks of it. Each call returns at once; answers come as messages."""

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

from baton.actors.messages import DiskReport
from baton.actors.tokens import Tokens


class StateFile(Struct, frozen=True):
    """A state on disk, as it was found at the start. size: bytes of the file."""

    salt: str
    tokens: Tokens
    size: int


class Disk(Protocol):
    """States in files, each named by the digest of its salt and tokens: writing one again replaces it.

    Calls are carried out in order.
    """

    def files(self) -> Sequence[StateFile]:
        """What is there, and belongs to this model."""
        ...

    def write(self, key: int, salt: str, tokens: Tokens) -> None:
        """Write the copy in host memory under `key` to its file; Written(key) follows."""

    def read(self, key: int, salt: str, tokens: Tokens) -> None:
        """Bring a file back to host memory under `key`; Loaded(key) follows. One that is damaged is deleted."""

    def delete(self, salt: str, tokens: Tokens) -> None:
        """Delete a file."""

    def clear(self, ticket: int) -> None:
        """Cleared(ticket) follows when every call before this one is carried out."""


class DiskThread(Disk, Protocol):
    """A disk whose calls are carried out while it is started; it outlives the unit of actors."""

    def scan_again(self) -> None:
        """Look at the files for the next unit, while it is not started. Blocks: not for the event loop."""

    def start(self, deliver: Callable[[DiskReport], None]) -> None:
        """deliver is called from a thread of its own."""

    def close(self) -> None:
        """Carry out what was asked for."""


class NoDisk:
    """Where no folder is given: nothing is ever asked of it."""

    def files(self) -> Sequence[StateFile]:
        return ()

    def write(self, key: int, salt: str, tokens: Tokens) -> None:
        raise AssertionError("there is no disk")

    def read(self, key: int, salt: str, tokens: Tokens) -> None:
        raise AssertionError("there is no disk")

    def delete(self, salt: str, tokens: Tokens) -> None:
        raise AssertionError("there is no disk")

    def clear(self, ticket: int) -> None:
        raise AssertionError("there is no disk")
