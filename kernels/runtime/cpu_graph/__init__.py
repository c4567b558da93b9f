"""Computations recorded as sequences of native calls, and replayed by one call."""

from baton.kernels.runtime.cpu_graph.memory import SharedMemory
from baton.kernels.runtime.cpu_graph.recording import Recording, record
from baton.kernels.runtime.cpu_graph.watching import NotRecordable

__all__ = ["NotRecordable", "Recording", "SharedMemory", "record"]
