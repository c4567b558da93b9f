"""The inbox: many small arrays, uploaded to the device in one copy."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.actors.forward.streams import Stream

ALIGNMENT = 16  # each array takes a multiple of this many bytes, so that all are aligned for Triton's kernels
DTYPES = {torch.int64: np.int64, torch.int32: np.int32, torch.float32: np.float32}


class Inbox:
    """Device memory for a step's input arrays, which are packed on the host and uploaded in one copy.

    Call `begin`, then `put` for each array, then `send`. `put` returns at once the tensor that will hold the array on
    the device; whatever reads it must be enqueued after `send`. The next packing overwrites the same memory from its
    beginning, which is safe because its upload comes after the step in stream order. So equal shapes, put in the same
    order, get the same addresses, which captured graphs rely on. On a CPU, arrays are packed into the memory that the
    step computes from, without a copy.
    """

    def __init__(self, nbytes: int, device: torch.device, stream: Stream) -> None:
        self._device, self._stream = device, stream
        self._is_shared = device.type == "cpu"
        self._blocks = [self._block(nbytes)]

    def begin(self) -> None:
        """Start a new packing. Work that is enqueued from now on must not use tensors of earlier packings."""
        if len(self._blocks) > 1:
            self._blocks = [self._block(sum(block.nbytes for block in self._blocks))]
            return
        [block] = self._blocks
        block.used = 0
        if not self._is_shared:
            block.use(self._stream.host_buffer(block.nbytes))  # the upload of the old buffer may be in flight

    def put(self, values: Sequence[float] | NDArray[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        """Pack an array, and return the tensor of its shape that will hold it on the device."""
        shape = values.shape if isinstance(values, np.ndarray) else (len(values),)
        size = values.size if isinstance(values, np.ndarray) else len(values)
        nbytes = -(-size * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        block = self._blocks[-1]
        if block.used + nbytes > block.nbytes:
            # Tensors of this packing point to the block, so it cannot be moved. This packing is sent in several copies.
            # For the next packing, `begin` makes one block that is large enough for all arrays.
            block = self._block(max(2 * nbytes, block.nbytes))
            self._blocks.append(block)
        begin = block.used // dtype.itemsize
        block.used += nbytes
        block.arrays[dtype][begin : begin + size] = values.reshape(-1) if isinstance(values, np.ndarray) else values
        tensor = block.tensors[dtype][begin : begin + size]
        return tensor if len(shape) == 1 else tensor.view(shape)

    def send(self) -> None:
        """Enqueue the upload of what was put."""
        if not self._is_shared:
            for block in self._blocks:
                if block.used:
                    self._stream.upload(block.host[: block.used], block.device[: block.used])

    def _block(self, nbytes: int) -> "Block":
        device = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return Block(device if self._is_shared else self._stream.host_buffer(nbytes), device)


class Block:
    """Host memory, uint8, and the device memory that it is copied to; on a CPU the same memory."""

    def __init__(self, host: Tensor, device: Tensor) -> None:
        self.device, self.nbytes, self.used = device, device.nbytes, 0
        self.tensors = {dtype: device.view(dtype) for dtype in DTYPES}
        self.use(host)

    def use(self, host: Tensor) -> None:
        """Pack into this host memory from now on."""
        self.host, as_bytes = host, host.numpy()
        self.arrays = {dtype: as_bytes.view(of_numpy) for dtype, of_numpy in DTYPES.items()}
