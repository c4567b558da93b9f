"""The same as reference.py, by Triton: six launches."""

from torch import Tensor

from baton.kernels.conv1d.triton import conv1d_prefill
from baton.kernels.delta_net.kda.triton import kda_scan
from baton.kernels.delta_net.kda_constants import KdaConstants
from baton.kernels.norm.gated.triton import gated_norm
from baton.kernels.prefill.plan import PrefillPlan


def kda_prefill(
    projected: Tensor,
    forget: Tensor,
    gate: Tensor,
    constants: KdaConstants,
    conv_pool: Tensor,
    state_pool: Tensor,
    plan: PrefillPlan,
) -> Tensor:
    """See reference.kda_prefill, but what is passed from one kernel to the next, and multiplied, is in the dtype of
    `projected`. Rows of what is projected may lie apart, and slots.
    """
    (heads, width, size), tokens, c = state_pool.shape[1:], len(projected), constants
    channels, keys = c.taps.shape[1], heads * size
    convolved = conv1d_prefill(projected[:, :channels], c.taps, None, conv_pool, plan.table)
    # Not .view, which gives a single token another stride, and so another kernel.
    o = kda_scan(
        convolved.as_strided((tokens, heads, size), (channels, size, 1), 0),
        convolved.as_strided((tokens, heads, size), (channels, size, 1), keys),
        convolved.as_strided((tokens, heads, width), (channels, width, 1), 2 * keys),
        forget,
        projected[:, channels:],
        *(state_pool, plan.table),
        A=c.A,
        dt_bias=c.dt_bias,
    )
    o = o.view(tokens, heads * width)
    return gated_norm(o, gate, c.norm, c.eps, heads, True, "sigmoid", dtype=projected.dtype)
