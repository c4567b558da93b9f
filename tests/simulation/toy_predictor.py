"""A head that predicts the right tokens, and wrong ones at places that its seed draws."""

import random

from tests.simulation.hash_device import Row
from tests.simulation.hash_oracle import VOCABULARY, oracle


class ToyPredictor:
    """Predicts tokens for the rows of a HashDevice. right: how likely each token is right, whatever grammars allow."""

    def __init__(self, seed: int, right: float, paged: bool) -> None:
        self._rng, self._right, self._paged = random.Random(f"predictions of {seed}"), right, paged

    def predict(self, row: Row, count: int) -> list[int]:
        """Return the `count` tokens that may follow the row's tokens."""
        tokens = oracle(row.tokens, count, row.request.sampling, self._paged) if count else []
        return [t if self._rng.random() < self._right else self._rng.randrange(VOCABULARY) for t in tokens]
