"""The scan of reference.py by Triton: which kernels run depends on whether a decay is a head's or a channel's."""

from torch import Tensor

from baton.kernels.delta_net.rule import triton_by_channel, triton_by_head
from baton.kernels.prefill.chunk_table import ChunkTable


def delta_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    pool: Tensor,
    table: ChunkTable,
    *,
    A: Tensor | None = None,
    dt_bias: Tensor | None = None,
) -> Tensor:
    """See reference.delta_scan, and the functions that this calls."""
    scan = triton_by_channel.delta_scan if g.dim() == 3 else triton_by_head.delta_scan
    return scan(q, k, v, g, beta, pool, table, A=A, dt_bias=dt_bias)
