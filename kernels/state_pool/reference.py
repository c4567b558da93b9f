"""Whole slots, or pages, of a slot-major pool."""

import torch
from torch import Tensor


def copy(pool: Tensor, sources: Tensor, targets: Tensor) -> None:
    """pool[targets[i]] = pool[sources[i]]; no target is named twice or is another's source.

    pool: uint8 [slots, bytes], contiguous, bytes a multiple of 64; sources, targets: int64 [n], on its device.
    """
    scatter(pool, targets, gather(pool, sources))


def clear(pool: Tensor, targets: Tensor) -> None:
    """pool[targets[i]] = 0."""
    pool.index_fill_(0, targets, 0)


def gather(pool: Tensor, sources: Tensor) -> Tensor:
    """pool[sources[i]], side by side: uint8 [n, bytes]."""
    return torch.index_select(pool, 0, sources)


def scatter(pool: Tensor, targets: Tensor, rows: Tensor) -> None:
    """pool[targets[i]] = rows[i]; rows: uint8 [n, bytes], contiguous; no target is named twice."""
    # torch copies element by element: eight bytes at a time are seven times as fast.
    pool.view(torch.int64).index_copy_(0, targets, rows.view(torch.int64))
