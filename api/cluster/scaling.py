"""The decision when a group of engines grows or shrinks."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.api.cluster.file import Scaling


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """The load of a group's engines, all of which are ready."""

    queues: Sequence[float]  # seconds of each engine's queue
    rows: Sequence[int]  # running requests of each engine

    @property
    def mean_queue(self) -> float:
        return sum(self.queues) / len(self.queues) if self.queues else 0.0

    @property
    def could_be_fewer(self) -> bool:
        """Whether nothing waits, and the others could take over the last engine's rows.

        They can if their rows grow to at most 1 + 1 ÷ n times what they are now, where n is the number of engines.
        """
        return len(self.rows) > 1 and not any(self.queues) and self.rows[-1] <= sum(self.rows[:-1]) / len(self.rows)


class Scaler:
    """The decisions for all groups, by the length of their queues and by how long it has lasted."""

    def __init__(self, settings: Scaling) -> None:
        self._settings = settings
        self._since: dict[tuple[str, bool], float] = {}  # since when (group, True) is too busy, (group, False) too idle

    def change(self, group: str, load: GroupLoad, least: int, most: int, now: float) -> int:
        """Return 1 if the group needs one more engine, -1 if it needs one fewer, else 0.

        now: time of a monotonic clock, in seconds
        """
        settings, count = self._settings, len(load.queues)
        if self._lasts((group, True), load.mean_queue > settings.queue and count < most, now, settings.up_after):
            return 1
        if self._lasts((group, False), load.could_be_fewer and count > least, now, settings.down_after):
            return -1
        return 0

    def _lasts(self, key: tuple[str, bool], holds: bool, now: float, seconds: float) -> bool:
        """Return whether a condition has held for this many seconds. If so, begin to count again."""
        if not holds:
            self._since.pop(key, None)
            return False
        if now - self._since.setdefault(key, now) < seconds:
            return False
        del self._since[key]
        return True
