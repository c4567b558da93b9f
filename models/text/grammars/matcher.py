"""The interface through which the ring tracks the position of an output in its grammar."""

from typing import Protocol


class GrammarMatcher(Protocol):
    """The position of one output in its grammar. It depends on the grammar and the consumed tokens only."""

    def consume(self, token: int) -> None:
        """Continue the output with this token. Raises GrammarError if the grammar does not allow it."""

    def fork(self) -> "GrammarMatcher":
        """Return a matcher at the same position, which continues on its own."""
        ...

    def accepts(self) -> bool:
        """Return whether the output may end here."""
        ...

    def is_complete(self) -> bool:
        """Return whether the output must end here."""
        ...

    def mask(self) -> bytes:
        """Return which tokens may follow, without those that end the output: int32 words of bits, as in RowMask.

        Raises GrammarError if computing the mask takes too long.
        """
        ...
