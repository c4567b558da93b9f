"""Kimi Delta Attention's recurrence: packed segments in chunks, and one token a row."""

from torch import Tensor

from baton.kernels.delta_net.kda import reference
from baton.kernels.prefill.chunk_table import ChunkTable
from baton.kernels.runtime import triton as gpu

__all__ = ["kda_scan", "kda_update"]


def kda_scan(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, table: ChunkTable) -> Tensor:
    """See reference.kda_scan."""
    if gpu.takes(v):
        from baton.kernels.delta_net.kda import triton

        return triton.kda_scan(q, k, v, g, beta, pool, table)
    return reference.kda_scan(q, k, v, g, beta, pool, table)


def kda_update(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, slots: Tensor, positions: Tensor
) -> Tensor:
    """See reference.kda_update."""
    if gpu.takes(v):
        from baton.kernels.delta_net.kda import triton_update

        return triton_update.kda_update(q, k, v, g, beta, pool, slots, positions)
    return reference.kda_update(q, k, v, g, beta, pool, slots, positions)
