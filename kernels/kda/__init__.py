"""Kimi Delta Attention's recurrence: packed segments in chunks, and one token a row."""

from torch import Tensor

from kernels import gpu
from kernels.kda import reference
from kernels.kda.reference import kda_scan

__all__ = ["kda_scan", "kda_update"]


def kda_update(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, slots: Tensor, positions: Tensor
) -> Tensor:
    """See reference.kda_update."""
    if gpu.takes(v):
        from kernels.kda import triton_update

        return triton_update.kda_update(q, k, v, g, beta, pool, slots, positions)
    return reference.kda_update(q, k, v, g, beta, pool, slots, positions)
