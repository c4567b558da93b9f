"""The arena: host memory that is allocated once, at the start, and lent in lines to the copies of states."""

import threading
import weakref
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from baton.actors.storage.lines import HostLines


class Arena:
    """Host memory in lines, safe to use from several threads.

    A GPU copies asynchronously only to and from page-locked memory. To lock memory takes long, and makes the device
    wait. So all of it is locked before the first request, and none is added or returned later.
    """

    def __init__(self, lines: HostLines, chunks: Sequence[Tensor]) -> None:
        """chunks: uint8 [bytes], each of whole lines"""
        self.lines = lines
        self._places = [
            chunk[begin : begin + lines.nbytes].numpy()
            for chunk in chunks
            for begin in range(0, len(chunk) - lines.nbytes + 1, lines.nbytes)
        ]
        self._free = deque(range(len(self._places)))
        self._taking = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of all lines."""
        return len(self._places) * self.lines.nbytes

    @property
    def free_lines(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[Tensor] | None:
        """Take lines: uint8 [bytes of a line], uninitialised; or None if there are too few.

        A line is free again when no tensor over its memory is left.
        """
        with self._taking:
            if count > len(self._free):
                return None
            return [self._line(self._free.popleft()) for _ in range(count)]

    def _line(self, index: int) -> Tensor:
        """Return a tensor with a storage of its own, whose end frees the line."""
        memory = self._places[index][:]
        # The end of a tensor may come in any thread, also in one that holds the lock; a deque needs none to append.
        weakref.finalize(memory, self._free.append, index).atexit = False
        return torch.from_numpy(memory)
