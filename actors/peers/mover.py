"""The interface to a mover, which reads copies of states from a peer's host memory into host memory here."""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

Landing: TypeAlias = Any
"""A copy in host memory: `HostState`, or the simulator's."""
Pulled: TypeAlias = Callable[[int, Landing | None, str, float], None]
"""Called when a pull has ended: with its ticket, the copy or None, why it failed or "", and the seconds in which the
copy's bytes arrived.
"""


class Mover(Protocol):
    """The carrier of the bytes of one link. Calls return at once.

    Only the reader's own memory is ever written: an abandoned transfer may go on writing, and only the reader can stop
    it. So a pull that was abandoned keeps its memory until `close` has ended.
    """

    def lend(self, ticket: int, key: int, first_page: int) -> bytes:
        """Let the peer read the copy under `key`; return what its mover needs to find the copy."""
        ...

    def withdraw(self, ticket: int) -> None:
        """End what `lend` allowed."""

    def pull(self, ticket: int, where: bytes, position: int, first_page: int) -> None:
        """Read a copy from the peer into new host memory. The function `pulled` that the mover was given is called."""

    def close(self, fenced: Callable[[], None]) -> None:
        """End all transfers. `fenced` is called when none of them can write any more; `pulled` is called for none."""
