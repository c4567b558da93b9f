"""What the ring asks of a grammar: where an output stands in it."""

from typing import Protocol


class GrammarError(Exception):
    """A grammar that cannot be compiled, or went wrong on the way; says where, in words for the client."""


class GrammarMatcher(Protocol):
    """One output, a token at a time. It depends on the grammar and on the tokens consumed, and on nothing else."""

    def consume(self, token: int) -> None:
        """The output goes on with this token. GrammarError if the grammar does not allow it."""

    def accepts(self) -> bool:
        """Whether the output may end here."""
        ...

    def is_complete(self) -> bool:
        """Whether it has to."""
        ...

    def mask(self) -> bytes:
        """Which tokens may follow, the end of the output not counted: int32 words of bits, as RowMask has them.

        GrammarError if that takes too much.
        """
        ...


def no_matcher(grammar: str) -> GrammarMatcher:
    """Where grammars are not wanted."""
    raise GrammarError("grammars are not supported here")
