"""The interface between the cache and the disk. Each call returns at once, and answers arrive as messages."""

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

from baton.actors.messages import DiskReport
from baton.actors.tokens import Tokens


class StateFile(Struct, frozen=True):
    """A state file that was found when the server or the unit of actors started."""

    salt: str
    tokens: Tokens
    size: int  # size of the file in bytes


class Disk(Protocol):
    """A store of states in files. Calls are carried out in order.

    The name of a file is a digest of the state's salt and tokens, so that writing a state again replaces its file.
    """

    def files(self) -> Sequence[StateFile]:
        """Return the files of this model that were found at the start of the server or the unit."""
        ...

    def write(self, key: int, salt: str, tokens: Tokens) -> None:
        """Write the copy that host memory has under `key` to its file, then send Written(key)."""

    def read(self, key: int, salt: str, tokens: Tokens) -> None:
        """Read a file into host memory under `key`, then send Loaded(key). A damaged file is deleted."""

    def delete(self, salt: str, tokens: Tokens) -> None:
        """Delete the file of this salt and these tokens."""

    def clear(self, ticket: int) -> None:
        """Send Cleared(ticket) when every earlier call is carried out."""


class DiskThread(Disk, Protocol):
    """A Disk that carries out calls between `start` and `close`. It survives restarts of the unit of actors."""

    def scan_again(self) -> None:
        """Scan the files for the next unit, while the disk is closed. It blocks: do not call it on the event loop."""

    def start(self, deliver: Callable[[DiskReport], None]) -> None:
        """Begin to carry out calls. deliver: receives the answers; it is called on the disk's thread."""

    def close(self) -> None:
        """Carry out all calls so far, then stop."""


class NoDisk:
    """The Disk of a server without a folder for states. The cache calls only `files`."""

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
