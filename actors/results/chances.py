"""Counting of how often drafts are right."""

REMEMBERED = 15 / 16  # weight of the past when a token shows whether its proposal was right
REMEMBERED_BY_ALL = 63 / 64  # the same for a chance that all requests share


class Chance:
    """A moving share of what was right; 1/2 before anything is known."""

    def __init__(self, remembered: float = REMEMBERED) -> None:
        self._remembered = remembered
        self._right = self._all = 0.0

    def add(self, is_right: bool) -> None:
        self._right, self._all = self._remembered * self._right + is_right, self._remembered * self._all + 1

    @property
    def value(self) -> float:
        return (self._right + 0.5) / (self._all + 1)
