"""The arena: host memory that is allocated once, at the start, and lent in lines to the copies of states."""

import mmap
import os
import sys
import threading
import weakref
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.actors.storage.lines import HostLines


class Arena:
    """Host memory in lines, safe to use from several threads.

    A GPU copies asynchronously only to and from page-locked memory. To lock memory takes long, and makes the device
    wait. So all of it is locked before the first request, and none is added or returned later.
    On a CPU the operating system provides a page of memory when it is first written to, which takes longer than the
    write itself. So lines that were written to before are lent first, and `keep_ready` writes to some in advance.
    """

    def __init__(self, lines: HostLines, chunks: Sequence[Tensor]) -> None:
        """chunks: uint8 [bytes], each of whole lines"""
        self.lines = lines
        self._chunks = [chunk.numpy() for chunk in chunks]
        *self._firsts, self._count = accumulate((len(chunk) // lines.nbytes for chunk in chunks), initial=0)
        self._unused = self._count  # lines from this one on were written to before, or are being written to
        self._ready: list[int] = []  # free lines that were written to before
        self._preparing = 0  # lines that are being written to in advance
        self._changing = threading.Condition()  # its lock is reentrant

    @property
    def nbytes(self) -> int:
        """Bytes of all lines."""
        return self._count * self.lines.nbytes

    @property
    def free_lines(self) -> int:
        with self._changing:
            return len(self._ready) + self._preparing + self._unused

    @property
    def ready_lines(self) -> int:
        """Free lines that were written to before."""
        return len(self._ready)

    @property
    def places(self) -> list[tuple[int, int]]:
        """Address and bytes of each chunk."""
        return [(chunk.ctypes.data, chunk.nbytes) for chunk in self._chunks]

    def contains(self, address: int, nbytes: int) -> bool:
        """Return whether memory lies within one chunk."""
        return any(begin <= address and address + nbytes <= begin + size for begin, size in self.places)

    def take(self, count: int) -> list[Tensor] | None:
        """Take lines: uint8 [bytes of a line], uninitialised; or None if there are too few.

        A line is free again when no tensor over its memory is left.
        """
        with self._changing:
            self._changing.wait_for(lambda: len(self._ready) + self._unused >= count or self.free_lines < count)
            if self.free_lines < count:
                return None
            lines = [self._line(self._next()) for _ in range(count)]
            self._changing.notify_all()
            return lines

    def keep_ready(self, count: int) -> None:
        """Start a thread that writes to lines in advance, so that `count` free ones have their memory.

        The thread ends when no line is left that was never written to, or when the arena is freed.
        """
        end = weakref.finalize(self, _wake, self._changing)
        end.atexit = False
        arguments = weakref.ref(self), end, self._changing, count
        threading.Thread(target=_keep_ready, args=arguments, name="host memory", daemon=True).start()

    def lacks(self, count: int) -> bool:
        """Return whether fewer than `count` free lines were written to before, or no other line is left."""
        return not self._unused or len(self._ready) < count

    def prepare_line(self) -> bool:
        """Write to a line that was never written to. Return False if none is left."""
        with self._changing:
            if not self._unused:
                return False
            self._unused -= 1
            self._preparing += 1
            line = self._unused
        self._memory(line)[:: mmap.PAGESIZE] = 0
        with self._changing:
            self._preparing -= 1
            self._ready.append(line)
            self._changing.notify_all()
        return True

    def _next(self) -> int:
        if self._ready:
            return self._ready.pop()
        self._unused -= 1
        return self._unused

    def _line(self, index: int) -> Tensor:
        """Return a tensor with a storage of its own, whose end frees the line."""
        memory = self._memory(index)
        # The end of a tensor may come in any thread, also in one that holds the lock; a list needs none to append.
        weakref.finalize(memory, self._ready.append, index).atexit = False
        return torch.from_numpy(memory)

    def _memory(self, index: int) -> NDArray[np.uint8]:
        place = bisect_right(self._firsts, index) - 1
        at = (index - self._firsts[place]) * self.lines.nbytes
        return self._chunks[place][at : at + self.lines.nbytes]


def _keep_ready(
    arena_of: "weakref.ref[Arena]", end: "weakref.finalize[..., Arena]", changing: threading.Condition, count: int
) -> None:
    """Prepare an arena's lines when it lacks some. While it lacks none, this holds no reference to the arena.

    end: wakes this thread when the arena is freed.
    """

    _lower_priority()

    def lacks() -> bool:
        arena = arena_of()
        return arena is not None and arena.lacks(count)

    goes_on = True
    while goes_on:
        with changing:
            # `end` is asked last, because the arena may be freed at the end of lacks().
            changing.wait_for(lambda: lacks() or not end.alive)
        arena = arena_of()
        goes_on = arena is not None and arena.prepare_line()
        del arena


def _lower_priority() -> None:
    """Let this thread wait for threads that copy into other lines: writing for the next copy halved their rate."""
    if sys.platform == "linux":  # Elsewhere this is the priority of the whole process.
        os.nice(10)


def _wake(changing: threading.Condition) -> None:
    with changing:
        changing.notify_all()
