"""Computations recorded as rows of native calls, and replayed by one."""

from baton.kernels.recorded.memory import SharedMemory
from baton.kernels.recorded.recording import Recording, record
from baton.kernels.recorded.watching import NotRecordable

__all__ = ["NotRecordable", "Recording", "SharedMemory", "record"]
