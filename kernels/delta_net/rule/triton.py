"""The scan of reference.py in Triton: chooses the kernels by whether there is one decay per head or per channel."""

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
    beta_scale: float = 1.0,
    lower_bound: float | None = None,
) -> Tensor:
    """Compute reference.delta_scan.

    triton_by_head.delta_scan and triton_by_channel.delta_scan describe dtypes, layouts, A and dt_bias.
    beta_scale: only with one decay per head. lower_bound: only with one per channel.
    """
    inputs = (q, k, v, g, beta, pool, table)
    if g.dim() == 3:
        return triton_by_channel.delta_scan(*inputs, A=A, dt_bias=dt_bias, lower_bound=lower_bound)
    return triton_by_head.delta_scan(*inputs, A=A, dt_bias=dt_bias, beta_scale=beta_scale)
