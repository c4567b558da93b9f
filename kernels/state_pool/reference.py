"""Copying and clearing of whole slots, or pages, of a slot-major pool."""

import torch
from torch import Tensor


def copy(pool: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy slots: pool[targets[i]] = pool[sources[i]], in place.

    pool: uint8 [slots, bytes], contiguous; bytes is a multiple of 64.
    sources, targets: int64 [n], on the pool's device. No target occurs twice or is the source of another copy.
    """
    scatter(pool, targets, gather(pool, sources))


def clear(pool: Tensor, targets: Tensor) -> None:
    """Set pool[targets[i]] to 0, in place."""
    pool.index_fill_(0, targets, 0)


def gather(pool: Tensor, sources: Tensor) -> Tensor:
    """Return a contiguous copy of the slots pool[sources[i]]: uint8 [n, bytes]."""
    return torch.index_select(pool, 0, sources)


def scatter(pool: Tensor, targets: Tensor, rows: Tensor) -> None:
    """Set pool[targets[i]] to rows[i], in place; rows: uint8 [n, bytes], contiguous. No target occurs twice."""
    # torch copies element by element, so elements of eight bytes are seven times as fast as single bytes.
    pool.view(torch.int64).index_copy_(0, targets, rows.view(torch.int64))
