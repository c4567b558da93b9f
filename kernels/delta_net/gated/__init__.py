"""The gated delta rule: packed segments in chunks, and one token a row."""

from torch import Tensor

from baton.kernels.delta_net.gated import reference
from baton.kernels.delta_net.gated.reference import unit_length
from baton.kernels.prefill.chunk_table import ChunkTable
from baton.kernels.runtime import triton as gpu

__all__ = ["gated_delta_prefill", "gated_delta_update", "unit_length"]


def gated_delta_prefill(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, table: ChunkTable
) -> Tensor:
    """See reference.gated_delta_prefill."""
    if gpu.takes(v):
        from baton.kernels.delta_net.gated import triton

        return triton.gated_delta_prefill(q, k, v, g, beta, pool, table)
    return reference.gated_delta_prefill(q, k, v, g, beta, pool, table)


def gated_delta_update(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, slots: Tensor, positions: Tensor
) -> Tensor:
    """See reference.gated_delta_update."""
    if gpu.takes(v):
        from baton.kernels.delta_net.gated import triton_update

        return triton_update.gated_delta_update(q, k, v, g, beta, pool, slots, positions)
    return reference.gated_delta_update(q, k, v, g, beta, pool, slots, positions)
