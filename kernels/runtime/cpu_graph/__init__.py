"""Computations recorded as rows of native calls, and replayed by one."""

from baton.kernels.runtime.cpu_graph.memory import SharedMemory
from baton.kernels.runtime.cpu_graph.recording import Recording, record
from baton.kernels.runtime.cpu_graph.watching import NotRecordable

__all__ = ["NotRecordable", "Recording", "SharedMemory", "record"]
