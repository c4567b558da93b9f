"""The constraint on a request's next token: its grammar, together with the tokens that stop the request."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from baton.actors.requests import Stops
from baton.actors.results.interfaces import Constrain
from baton.models.text.grammars.errors import GrammarError
from baton.models.text.grammars.matcher import GrammarMatcher


def constrained_by(matcher: Callable[[str], GrammarMatcher]) -> Constrain:
    """Return a Constrain, which makes the constraint of a request.

    matcher: returns a new matcher at the beginning of a grammar. Raises GrammarError if the grammar cannot be used.
    """
    return lambda request, output: Constraint(matcher(request.grammar), request.stops, output)


class Constraint:
    """The constraint on one output. It can be rebuilt from the output's tokens alone."""

    def __init__(self, matcher: GrammarMatcher, stops: Stops, output: Iterable[int]) -> None:
        self._matcher, self._stops = matcher, stops
        for token in output:
            matcher.consume(token)

    def consume(self, token: int) -> bool:
        """Advance by a token that does not stop the output. Return whether the output must end after it."""
        self._matcher.consume(token)
        return self._matcher.is_complete()

    def words(self, drawn: int) -> bytes | None:
        """Return the mask of the next token, in the format of RowMask.words; None if the output must end here.

        drawn: how many tokens the output has.

        Where the grammar may end, the tokens that stop the request are allowed too. Before min_tokens they are
        forbidden, unless no other token is allowed. Raises GrammarError if the grammar can neither continue nor end.
        """
        return self._words(self._matcher, drawn)

    def ahead(self, tokens: Sequence[int], drawn: int) -> list[bytes]:
        """Return the masks after each of these tokens, if they were consumed, up to the first that may not be."""
        matcher, masks = self._matcher.fork(), list[bytes]()
        with suppress(GrammarError):
            for number, token in enumerate(tokens, start=1):
                matcher.consume(token)
                words = None if matcher.is_complete() else self._words(matcher, drawn + number)
                if words is None:
                    break
                masks.append(words)
        return masks

    def _words(self, matcher: GrammarMatcher, drawn: int) -> bytes | None:
        allowed, ends = matcher.mask(), self._stops.token_ids
        if is_empty(allowed):
            if not matcher.accepts():
                raise GrammarError("no token of this model can continue the grammar, and it cannot end here")
            return None
        if drawn < self._stops.min_tokens:
            others = with_bits(allowed, ends, 0)
            return allowed if is_empty(others) else others
        return with_bits(allowed, ends, 1) if matcher.accepts() else allowed


def is_empty(words: bytes) -> bool:
    return words == bytes(len(words))


def with_bits(words: bytes, tokens: Iterable[int], bit: int) -> bytes:
    """Return the words with the bits of these tokens set to `bit`."""
    changed = bytearray(words)
    for token in tokens:
        if bit:
            changed[token // 8] |= 1 << token % 8
        else:
            changed[token // 8] &= ~(1 << token % 8)
    return bytes(changed)
