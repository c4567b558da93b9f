"""The drafters of a request: n-grams of its own text, and the model's head for multi-token prediction."""

from collections.abc import Callable, Sequence
from typing import Protocol

from baton.actors.requests import BY_HEAD, BY_NGRAMS, Request
from baton.actors.results.chances import REMEMBERED_BY_ALL, REMEMBERED_OF_TEXTS, Chance
from baton.actors.results.ngrams import LENGTHS, NgramDrafter
from baton.actors.tokens import unpack


class Proposer(Protocol):
    """One source of drafts, which is given every token of the request's history."""

    name: str  # for metrics

    def push(self, token: int) -> None:
        """Add a token."""
        ...

    def propose(self, most: int) -> tuple[list[int], float]:
        """Return at most `most` tokens that may come next, and the chance of each, as in Proposal."""
        ...


class HeadDrafter:
    """Proposes what the model's head for multi-token prediction has predicted for one request.

    chance: how likely a token is right if those before it are, which all requests count together.
    """

    name = "mtp"

    def __init__(self, chance: Chance) -> None:
        self._chance = chance
        self._predicted: list[int] = []  # what has not come yet, the last token first

    @property
    def chance(self) -> float:
        return self._chance.value

    def predicted(self, tokens: Sequence[int]) -> None:
        """Replace the predicted tokens, the first of which may come next."""
        self._predicted = list(tokens[::-1])

    def push(self, token: int) -> None:
        """Add a token, and count whether it was predicted."""
        if self._predicted:
            is_right = self._predicted.pop() == token
            self._chance.add(is_right)
            if not is_right:
                self._predicted = []

    def propose(self, most: int) -> tuple[list[int], float]:
        """Return at most `most` tokens that may come next, and the chance of each, as in Proposal."""
        return self._predicted[::-1][:most], self._chance.value


class Drafters:
    """A Drafter of several sources: the one proposes of which more tokens are expected to be right."""

    def __init__(self, own: Sequence[Proposer], head: HeadDrafter | None) -> None:
        self.name = ""
        self._head = head
        self._all = [*own, head] if head is not None else [*own]

    def push(self, token: int) -> None:
        for drafter in self._all:
            drafter.push(token)

    @property
    def chance(self) -> float:
        return self._head.chance if self._head is not None else 0.0

    def predicted(self, tokens: Sequence[int]) -> None:
        if self._head is not None:
            self._head.predicted(tokens)

    def propose(self, most: int) -> tuple[list[int], float]:
        best, proposed = 0.0, (list[int](), 0.0)
        for drafter in self._all:
            tokens, chance = drafter.propose(most)
            right = sum(chance**number for number in range(1, len(tokens) + 1))
            if right > best:
                best, proposed, self.name = right, (tokens, chance), drafter.name
        return proposed


def draft(kinds: str = "auto") -> Callable[[Request, Sequence[int]], Drafters | None]:
    """Return a function that makes the drafters of a request; it returns None if the request wants none of them.

    kinds: the drafters that there may be, as in Request.speculation.
    """
    chance = Chance(REMEMBERED_BY_ALL)
    priors = {length: Chance(REMEMBERED_OF_TEXTS) for length in LENGTHS}

    def make(request: Request, history: Sequence[int]) -> Drafters | None:
        by_ngrams, by_head = ({kinds, request.speculation} <= {*of} for of in (BY_NGRAMS, BY_HEAD))
        own = [NgramDrafter(history, unpack(request.prediction), priors)] if by_ngrams else []
        return Drafters(own, HeadDrafter(chance) if by_head else None) if by_ngrams or by_head else None

    return make
