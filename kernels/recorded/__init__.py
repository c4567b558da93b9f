"""Computations recorded as rows of native calls, and replayed by one."""

from kernels.recorded.memory import SharedMemory
from kernels.recorded.recording import Recording, record
from kernels.recorded.watching import NotRecordable

__all__ = ["NotRecordable", "Recording", "SharedMemory", "record"]
