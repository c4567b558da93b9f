"""The interface to a mover, which reads copies of states from a peer's host memory into host memory here."""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

Landing: TypeAlias = Any
"""A copy in host memory that a pull has read: a `HostState`, or the simulator's stand-in."""
Pulled: TypeAlias = Callable[[int, Landing | None, str, float], None]
"""Called when a pull has ended. Arguments: the ticket; the copy, or None if the pull failed; why it failed, or ""; the
seconds that the copy's bytes took to arrive.
"""


class Mover(Protocol):
    """The part of a link that moves the bytes of copies. Calls return at once.

    A transfer writes only to the reading engine's memory. After a pull is abandoned its transfer may still be writing,
    and only the reading engine can stop it. So an abandoned pull keeps its memory until `close` has ended.
    """

    def lend(self, ticket: int, key: int, first_page: int) -> bytes:
        """Let the peer read the copy under `key`. Return `Rows.where`, with which the peer's mover finds the copy."""
        ...

    def withdraw(self, ticket: int) -> None:
        """End what `lend` allowed."""

    def pull(self, ticket: int, where: bytes, position: int, first_page: int) -> None:
        """Read a copy from the peer into new host memory, then call the `pulled` that the mover was made with."""

    def close(self, fenced: Callable[[], None]) -> None:
        """End all transfers without calling `pulled`. Call `fenced` when none of them can write any more."""
