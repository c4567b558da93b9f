"""Estimates of the time to compute tokens, and of the time to restore the state at their end from a copy."""

from baton.actors.cache.below.limits import TierLimits
from baton.actors.cache.worth.order import Costs
from baton.actors.control import Speeds

# Seconds to read one byte of a file, assumed until the first file has been read.
DISK_AT_FIRST = 1 / 500e6
# Weight of the newest measurement in the moving average of the disk's speed.
NEWEST = 0.2


class Prices:
    """Estimates, in seconds, of computing tokens and of restoring copies, from measured speeds.

    As long as the device's speed is unknown, making a copy never pays, and a copy that exists is always restored.
    """

    def __init__(self, costs: Costs, limits: TierLimits) -> None:
        self._costs, self._limits = costs, limits
        self._speeds = Speeds(0.0, 0.0)
        self._file_byte = DISK_AT_FIRST  # seconds to read one byte of a file

    def measured(self, speeds: Speeds) -> None:
        self._speeds = speeds

    def measured_file(self, size: int, seconds: float) -> None:
        """Note that reading a file of `size` bytes took this long."""
        self._file_byte += NEWEST * (seconds / size - self._file_byte)

    def is_quicker(self, position: int, start: int, in_host: bool) -> bool:
        """Return whether restoring a copy at `position` is faster than computing the tokens [start, position)."""
        return not self._speeds.operation or self._bringing(position, in_host) < self.computing(start, position)

    def pays(self, chance: float, position: int, start: int, in_host: bool = True) -> bool:
        """Return whether a copy is expected to save more time than it takes to make.

        chance: the probability that a request ever resumes from the copy
        position: the position of the copy
        start: the position of the next state above the copy, from which its tokens would be computed
        in_host: whether the copy is to be made in host memory; otherwise in a file
        """
        moving = self._bringing(position, in_host)
        if in_host and self._limits.memory_bytes(position) > self._limits.host_bytes:
            return False
        return chance * (self.computing(start, position) - moving) > moving

    def computing(self, start: int, end: int) -> float:
        """Return the seconds in which the device computes the tokens [start, end); 0 if its speed is unknown."""
        return self._costs.saved(start, end) * self._speeds.operation

    def _bringing(self, position: int, in_host: bool) -> float:
        from_host = self._limits.copied_bytes(position) * self._speeds.byte
        return from_host if in_host else from_host + self._limits.file_bytes(position) * self._file_byte
