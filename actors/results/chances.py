"""Counting of how often drafts are right."""

REMEMBERED = 15 / 16  # weight of the past when a token shows whether its proposal was right
REMEMBERED_BY_ALL = 63 / 64  # the same for the chance of a head's predictions, which all requests share
REMEMBERED_OF_TEXTS = 511 / 512  # the same for repetitions in the texts of all requests, which differ more


class Chance:
    """A moving share of what was right.

    remembered: weight of the past.
    prior: the chance of others of its kind, which counts like one observation, and to which each one is added; None:
        1/2 counts like one.
    """

    def __init__(self, remembered: float = REMEMBERED, prior: "Chance | None" = None) -> None:
        self._remembered, self._prior = remembered, prior
        self._right = self._all = 0.0

    def add(self, is_right: bool) -> None:
        self._right, self._all = self._remembered * self._right + is_right, self._remembered * self._all + 1
        if self._prior is not None:
            self._prior.add(is_right)

    @property
    def value(self) -> float:
        return (self._right + (self._prior.value if self._prior is not None else 0.5)) / (self._all + 1)
