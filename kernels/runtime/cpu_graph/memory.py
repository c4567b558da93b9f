"""Where the intermediate results of a recording lie: those that are never needed at the same time share memory."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes of a line of a CPU's cache


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A buffer of `size` bytes, used by calls `first` to `last`."""

    size: int
    first: int
    last: int


class SharedMemory:
    """For recordings of which one runs at a time: each may write over what the others left."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """uint8, at least so many bytes."""
        if self._memory.nbytes < size:
            self._memory = torch.empty(2 * size, dtype=torch.uint8)
        return self._memory


def lay_out(lifetimes: Sequence[Lifetime]) -> tuple[list[int], int]:
    """An offset for each buffer, aligned, and how much memory that takes, in bytes.

    Each goes to the lowest place that is free while it is used, in the order of first use.
    """
    offsets, taken = [0] * len(lifetimes), list[int]()
    for index in sorted(range(len(lifetimes)), key=lambda i: lifetimes[i].first):
        wanted = lifetimes[index]
        taken = [other for other in taken if lifetimes[other].last >= wanted.first]
        offset = 0
        for other in sorted(taken, key=lambda i: offsets[i]):
            if offset + wanted.size <= offsets[other]:
                break
            offset = max(offset, _aligned(offsets[other] + lifetimes[other].size))
        offsets[index] = offset
        taken.append(index)
    ends = [_aligned(offset + buffer.size) for offset, buffer in zip(offsets, lifetimes, strict=True)]
    return offsets, max(ends, default=0)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
