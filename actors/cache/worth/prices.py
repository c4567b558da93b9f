"""What it takes to compute tokens, and to bring their state back from below the pool instead, as it was measured."""

from baton.actors.cache.limits import TierLimits
from baton.actors.cache.worth.order import Costs
from baton.actors.control import Speeds

# Of a disk that nothing was read from yet: seconds for a byte.
DISK_AT_FIRST = 1 / 500e6
# How much of what was measured last counts of the disk's speed.
NEWEST = 0.2


class Prices:
    """Seconds. A part of the cache.

    As long as nothing is known of the device no copy pays, and whatever there is is brought back.
    """

    def __init__(self, costs: Costs, limits: TierLimits) -> None:
        self._costs, self._limits = costs, limits
        self._speeds = Speeds(0.0, 0.0)
        self._file_byte = DISK_AT_FIRST

    def measured(self, speeds: Speeds) -> None:
        self._speeds = speeds

    def measured_file(self, size: int, seconds: float) -> None:
        """A file of this size was read."""
        self._file_byte += NEWEST * (seconds / size - self._file_byte)

    def is_quicker(self, position: int, start: int, in_host: bool) -> bool:
        """Whether to bring a copy at this position back takes less than to compute it from `start` on."""
        return not self._speeds.operation or self._bringing(position, in_host) < self._computing(start, position)

    def pays(self, chance: float, position: int, start: int, in_host: bool = True) -> bool:
        """Whether a copy is likely to save more than it costs to make, at this chance that somebody goes on from it.

        in_host: in host memory; else in a file.
        """
        moving = self._bringing(position, in_host)
        if in_host and self._limits.memory_bytes(position) > self._limits.host_bytes:
            return False
        return chance * (self._computing(start, position) - moving) > moving

    def _computing(self, start: int, end: int) -> float:
        return self._costs.saved(start, end) * self._speeds.operation

    def _bringing(self, position: int, in_host: bool) -> float:
        from_host = self._limits.copied_bytes(position) * self._speeds.byte
        return from_host if in_host else from_host + self._limits.file_bytes(position) * self._file_byte
