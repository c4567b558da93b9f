"""What the grammar of a request allows, together with the tokens that stop it."""

from collections.abc import Iterable

from baton.actors.requests import Stops
from baton.models.text.grammars.matcher import GrammarError, GrammarMatcher


class Constraint:
    """Follows one output, and is rebuilt from its tokens alone."""

    def __init__(self, matcher: GrammarMatcher, stops: Stops, output: Iterable[int]) -> None:
        self._matcher, self._stops = matcher, stops
        for token in output:
            matcher.consume(token)

    def consume(self, token: int) -> bool:
        """Go on with a token that does not stop the output; whether the output has to end behind it."""
        self._matcher.consume(token)
        return self._matcher.is_complete()

    def words(self, drawn: int) -> bytes | None:
        """The mask of the next token, after `drawn`: as RowMask.words; None where nothing may follow.

        Where the output may end, what stops it is allowed; but for the first min_tokens, unless there is nothing else.
        """
        allowed, ends = self._matcher.mask(), self._stops.token_ids
        if is_empty(allowed):
            if not self._matcher.accepts():
                raise GrammarError("no token of this model can go on in the grammar")
            return None
        if drawn < self._stops.min_tokens:
            others = with_bits(allowed, ends, 0)
            return allowed if is_empty(others) else others
        return with_bits(allowed, ends, 1) if self._matcher.accepts() else allowed


def is_empty(words: bytes) -> bool:
    return words == bytes(len(words))


def with_bits(words: bytes, tokens: Iterable[int], bit: int) -> bytes:
    """The words in which the bits of these tokens are `bit`."""
    changed = bytearray(words)
    for token in tokens:
        if bit:
            changed[token // 8] |= 1 << token % 8
        else:
            changed[token // 8] &= ~(1 << token % 8)
    return bytes(changed)
