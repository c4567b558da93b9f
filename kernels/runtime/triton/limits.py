"""Limits of a kernel's programs on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

KIB = 1024
LEAST = 99 * KIB
"""Bytes of shared memory that a program may use on the smaller GPUs."""

_assumed = LEAST


def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that one program may use; LEAST for kinds of GPU that are not listed."""
    return _of_gpu(device.index or 0) if device.type == "cuda" else _assumed


@contextmanager
def assumed(shared: int) -> Iterator[None]:
    """Let programs of devices that are no GPU use `shared` bytes, to choose configurations of a GPU that is not there.

    Not thread-safe.
    """
    global _assumed
    before, _assumed = _assumed, shared
    try:
        yield
    finally:
        _assumed = before


@cache
def _of_gpu(index: int) -> int:
    """Return the bytes of shared memory that one program may use on a GPU."""
    if torch.version.hip:
        return 64 * KIB
    large = {(8, 0): 163 * KIB, (9, 0): 227 * KIB, (10, 0): 227 * KIB, (10, 3): 227 * KIB}
    return large.get(torch.cuda.get_device_capability(index), LEAST)
