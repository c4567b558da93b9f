"""When a group of engines grows and shrinks."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.api.cluster.file import Scaling


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """The load of a group's engines, all of which are ready."""

    queues: Sequence[float]  # seconds of each engine's queue
    rows: Sequence[int]  # of each engine

    @property
    def mean_queue(self) -> float:
        return sum(self.queues) / len(self.queues) if self.queues else 0.0

    @property
    def could_be_fewer(self) -> bool:
        """Whether nothing waits, and the last engine's rows would be less than the others' own."""
        return len(self.rows) > 1 and not any(self.queues) and self.rows[-1] <= sum(self.rows[:-1]) / len(self.rows)


class Scaler:
    """Decides by seconds of queue, and by how long they have been so."""

    def __init__(self, settings: Scaling) -> None:
        self._settings = settings
        self._since: dict[tuple[str, bool], float] = {}  # since when a group has been too busy, or not busy enough

    def change(self, group: str, load: GroupLoad, least: int, most: int, now: float) -> int:
        """Return 1 if the group needs a further engine, -1 if it needs one fewer, else 0.

        now: seconds of a clock that never goes back
        """
        settings, count = self._settings, len(load.queues)
        if self._lasts((group, True), load.mean_queue > settings.queue and count < most, now, settings.up_after):
            return 1
        if self._lasts((group, False), load.could_be_fewer and count > least, now, settings.down_after):
            return -1
        return 0

    def _lasts(self, key: tuple[str, bool], holds: bool, now: float, seconds: float) -> bool:
        """Return whether something has held for so long; if so, begin to count again."""
        if not holds:
            self._since.pop(key, None)
            return False
        if now - self._since.setdefault(key, now) < seconds:
            return False
        del self._since[key]
        return True
