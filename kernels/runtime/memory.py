"""Memory of a CPU in huge pages, which is read faster: fewer addresses are translated, and prefetches go further."""

import ctypes
import math
import mmap
import sys
from contextlib import suppress

import torch
from torch import Tensor

CPU = torch.device("cpu")
HUGE_PAGE = 2**21
MOST_UNUSED = 1 / 8
"""The largest share of the huge pages that may be unused. With more, the end of the memory is in small pages."""


def mapped(nbytes: int) -> Tensor:
    """Map zeroed memory, uint8 [nbytes], in huge pages where the system has them.

    The system gives each part when it is first written to. Raises OSError if it refuses this much memory.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    whole = -(-nbytes // HUGE_PAGE) * HUGE_PAGE
    huge = whole if whole - nbytes <= MOST_UNUSED * whole else whole - HUGE_PAGE
    length = max(huge, nbytes) + (HUGE_PAGE if huge else 0)  # A mapping need not begin with a huge page.
    # Windows has only one kind of anonymous memory.
    private = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    try:
        memory = mmap.mmap(-1, length, **private)
    except OSError as error:
        raise OSError(error.errno, f"the system refuses {nbytes} bytes of memory: {error.strerror}") from None
    first = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE_PAGE if huge else 0
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE, first, huge)
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=first)


def empty(*shape: int, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
    """Return a tensor for weights, which are read in every step: in huge pages on a CPU, if it is large enough.

    Its contents are undefined. Raises OSError if the system refuses the memory.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or nbytes < (1 - MOST_UNUSED) * HUGE_PAGE:
        return torch.empty(*shape, dtype=dtype, device=device)
    return mapped(nbytes).view(dtype).view(shape)


def stacked(tensors: list[Tensor]) -> Tensor:
    """Return torch.stack(tensors), without gradients, as `empty` allocates it."""
    tensors = [tensor.detach() for tensor in tensors]
    first = tensors[0]
    return torch.stack(tensors, out=empty(len(tensors), *first.shape, dtype=first.dtype, device=first.device))


def joined(tensors: list[Tensor]) -> Tensor:
    """Return torch.cat(tensors), without gradients, as `empty` allocates it."""
    tensors = [tensor.detach() for tensor in tensors]
    first = tensors[0]
    length = sum(len(tensor) for tensor in tensors)
    return torch.cat(tensors, out=empty(length, *first.shape[1:], dtype=first.dtype, device=first.device))
