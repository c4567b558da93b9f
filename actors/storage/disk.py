"""The seam between the cache and the disk. Each call returns at once; answers come as messages."""

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

from baton.actors.messages import DiskReport
from baton.actors.tokens import Tokens


class StateFile(Struct, frozen=True):
    """A state on disk, as it was found at the start."""

    salt: str
    tokens: Tokens
    size: int  # of the file, in bytes


class Disk(Protocol):
    """States in files, each named by the digest of its salt and tokens, so that writing one again replaces it.

    Calls are carried out in order.
    """

    def files(self) -> Sequence[StateFile]:
        """Return the files of this model that were found at the start."""
        ...

    def write(self, key: int, salt: str, tokens: Tokens) -> None:
        """Write the copy in host memory under `key` to its file; Written(key) follows."""

    def read(self, key: int, salt: str, tokens: Tokens) -> None:
        """Read a file into host memory under `key`; Loaded(key) follows. A damaged file is deleted."""

    def delete(self, salt: str, tokens: Tokens) -> None:
        """Delete a file."""

    def clear(self, ticket: int) -> None:
        """Send Cleared(ticket) when every call before this one is carried out."""


class DiskThread(Disk, Protocol):
    """A disk that carries out calls between `start` and `close`. It outlives the unit of actors."""

    def scan_again(self) -> None:
        """Look at the files for the next unit, while the disk is closed. Blocks: do not call it on the event loop."""

    def start(self, deliver: Callable[[DiskReport], None]) -> None:
        """Begin to carry out calls. deliver: takes the answers; it is called on the disk's thread."""

    def close(self) -> None:
        """Carry out all calls so far, then stop."""


class NoDisk:
    """The disk of a server without a folder for states. The cache never calls it."""

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
