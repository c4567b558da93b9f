"""Many small arrays in one copy to the device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.actors.forward.streams import Stream

ALIGNMENT = 16  # bytes, which Triton's kernels expect
DTYPES = {torch.int64: np.int64, torch.int32: np.int32, torch.float32: np.float32}


@dataclass(frozen=True, slots=True)
class Section:
    """Where an array lies in the upload: from element `begin` on, of its own dtype."""

    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Packing:
    """Arrays are put into host memory behind each other; which lie where depends on those before alone."""

    def __init__(self, memory: Tensor, allocate: Callable[[int], Tensor]) -> None:
        self.nbytes = 0
        self._allocate = allocate
        self._take(memory)

    def put(self, values: Sequence[float] | NDArray[Any], dtype: torch.dtype = torch.int64) -> Section:
        shape = values.shape if isinstance(values, np.ndarray) else (len(values),)
        size = values.size if isinstance(values, np.ndarray) else len(values)
        begin, end = self.nbytes // dtype.itemsize, self.nbytes // dtype.itemsize + size
        self.nbytes += -(-size * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        if self.nbytes > self.memory.nbytes:
            self._grow()
        self._views[dtype][begin:end] = values.reshape(-1) if isinstance(values, np.ndarray) else values
        return Section(begin, shape, dtype)

    def _grow(self) -> None:
        before = self.memory
        self._take(self._allocate(2 * self.nbytes))
        self.memory[: before.nbytes] = before

    def _take(self, memory: Tensor) -> None:
        self.memory = memory
        bytes_of = memory.numpy()
        self._views = {dtype: bytes_of.view(of_numpy) for dtype, of_numpy in DTYPES.items()}


class Inbox:
    """Device memory for what comes with a step, each time the same, from its beginning on.

    It is written over in stream order, and so behind the step before. A CPU computes from where it was packed.
    """

    def __init__(self, nbytes: int, device: torch.device, stream: Stream) -> None:
        self._stream, self._is_shared = stream, device.type == "cpu"
        self._take(torch.empty(nbytes, dtype=torch.uint8, device=device))

    def packing(self) -> Packing:
        allocate = self._stream.host_buffer
        return Packing(self._memory if self._is_shared else allocate(self._memory.nbytes), allocate)

    def send(self, packing: Packing) -> None:
        """Enqueue the one copy. Views of what was sent before are void."""
        if packing.nbytes > self._memory.nbytes:
            self._take(packing.memory if self._is_shared else self._memory.new_empty(packing.memory.nbytes))
        if packing.nbytes and not self._is_shared:
            self._stream.upload(packing.memory[: packing.nbytes], self._memory[: packing.nbytes])

    def view(self, section: Section) -> Tensor:
        """What has been sent."""
        shape = section.shape
        if len(shape) == 1:
            return self._views[section.dtype][section.begin : section.begin + shape[0]]
        size = int(np.prod(shape))
        return self._views[section.dtype][section.begin : section.begin + size].view(shape)

    def _take(self, memory: Tensor) -> None:
        self._memory = memory
        self._views = {dtype: memory.view(dtype) for dtype in DTYPES}
