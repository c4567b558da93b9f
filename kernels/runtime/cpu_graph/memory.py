"""Memory of a recording's intermediate results: results that are never live at the same time share memory."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes of a CPU's cache line


@dataclass(frozen=True, slots=True)
class Lifetime:
    """The size of a buffer, and the calls that use the buffer."""

    size: int  # bytes
    first: int  # number of the first call that uses the buffer
    last: int  # number of the last call that uses the buffer


class SharedMemory:
    """Memory shared by recordings of which only one runs at a time. Each recording may overwrite the data of the
    others.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """Return at least `size` bytes of memory, uint8. Earlier recordings keep the memory that they took."""
        if self._memory.nbytes < size:
            self._memory = torch.empty(2 * size, dtype=torch.uint8)
        return self._memory


def lay_out(lifetimes: Sequence[Lifetime]) -> tuple[list[int], int]:
    """Return an aligned offset for each buffer, and the bytes of memory that they take together.

    Greedy first fit: in the order of their first use, each buffer gets the lowest offset that is free during its
    lifetime.
    """
    offsets, live = [0] * len(lifetimes), list[int]()
    for index in sorted(range(len(lifetimes)), key=lambda i: lifetimes[i].first):
        buffer = lifetimes[index]
        live = [other for other in live if lifetimes[other].last >= buffer.first]
        offset = 0
        for other in sorted(live, key=lambda i: offsets[i]):
            if offset + buffer.size <= offsets[other]:  # The buffer fits into the gap below `other`.
                break
            offset = max(offset, _aligned(offsets[other] + lifetimes[other].size))
        offsets[index] = offset
        live.append(index)
    ends = [_aligned(offset + buffer.size) for offset, buffer in zip(offsets, lifetimes, strict=True)]
    return offsets, max(ends, default=0)


def _aligned(size: int) -> int:
    """Round up to a multiple of ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT
