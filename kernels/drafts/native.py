"""The arguments of C functions that compute decoding rows (feed.h)."""

import torch
from torch import Tensor

from baton.kernels.drafts.feed import Drafts, check_ring
from baton.kernels.runtime.cpp import INT64, POINTER

FEED = (POINTER, POINTER, POINTER, POINTER, INT64)
NO_DRAFTS = (None, None, None, None, 0)


def check_rows(slots: Tensor, positions: Tensor) -> None:
    """Raise ValueError unless `slots` and `positions` are contiguous int64 tensors [rows]."""
    for numbers in (slots, positions):
        if numbers.dtype != torch.int64 or numbers.shape != slots.shape or not numbers.is_contiguous():
            raise ValueError(f"slots and positions must be {len(slots)} contiguous int64 numbers each")


def feed_arguments(
    projected: Tensor, rows: int, columns: int, drafts: Drafts | None, ring: Tensor | None
) -> tuple[int | None, int | None, int | None, int | None, int]:
    """Return the pointers begins, offsets, rings and ring, and the ring's stride. Raise ValueError if they do not fit.

    projected: [fed tokens, …]. columns: the number of inputs of a token in the ring.
    """
    if drafts is None:
        if len(projected) != rows:
            raise ValueError(f"{len(projected)} tokens for {rows} rows")
        return NO_DRAFTS
    ring = check_ring(drafts, ring, columns, projected.dtype)
    if len(drafts.rings) != rows:
        raise ValueError(f"{len(drafts.rings)} indices of rings for {rows} rows")
    pointers = drafts.begins.data_ptr(), drafts.offsets.data_ptr(), drafts.rings.data_ptr()
    return *pointers, ring.data_ptr(), ring.stride(0)
