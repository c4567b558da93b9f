"""A drafter that knows the right output, and proposes wrong tokens at places that its seed draws."""

import random
from collections.abc import Sequence

from baton.actors.requests import Request
from baton.actors.results.chances import Chance
from baton.actors.results.drafters import Drafters, HeadDrafter
from tests.simulation.hash_oracle import ANY, VOCABULARY, oracle
from tests.simulation.toy_grammar import ToyGrammar, may_draw


class ToyDrafter:
    """A Proposer. right: how likely each token that it proposes is right."""

    name = "toy"

    def __init__(self, request: Request, history: Sequence[int], paged: bool, right: float, rng: random.Random) -> None:
        self._tokens, self._request, self._paged = list(history), request, paged
        self._right, self._rng = right, rng

    def push(self, token: int) -> None:
        self._tokens.append(token)

    def propose(self, most: int) -> tuple[list[int], float]:
        number = self._rng.randint(0, most)
        proposed = oracle(self._tokens, number, self._request.sampling, self._paged, self._allowed) if number else []
        wrong = [index for index in range(len(proposed)) if self._rng.random() >= self._right]
        for index in wrong:
            proposed[index] = self._rng.randrange(VOCABULARY)
        return proposed, self._rng.choice([0.2, 0.5, 0.9])

    def _allowed(self, output: list[int]) -> Sequence[int]:
        """Return the tokens that may follow this output after the history."""
        if not self._request.grammar:
            return ANY
        before = self._tokens[self._request.prompt_len :]
        return may_draw(ToyGrammar.read(self._request.grammar), before + output, self._request.stops)


def draft_toys(right: float, paged: bool, chance: Chance, request: Request, history: Sequence[int]) -> Drafters | None:
    """Return the drafters of a request. chance: how likely tokens are right that the device predicts."""
    rng = random.Random(f"drafts of {request.id}, {len(history)}")
    own = ToyDrafter(request, history, paged, right, rng)
    return Drafters([own], HeadDrafter(chance)) if request.speculation != "off" else None
