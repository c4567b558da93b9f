"""The operation of reference.py in Triton, in five launches."""

from torch import Tensor

from baton.kernels.conv1d.triton import conv1d_prefill
from baton.kernels.mamba2.constants import MixerConstants
from baton.kernels.mamba2.ssd.triton import ssd_prefill
from baton.kernels.norm.gated.triton import gated_norm
from baton.kernels.prefill.plan import PrefillPlan


def mixer_prefill(
    projected: Tensor, constants: MixerConstants, conv_pool: Tensor, state_pool: Tensor, plan: PrefillPlan
) -> Tensor:
    """Compute reference.mixer_prefill, with operands of products and intermediate results in projected's dtype.

    `projected` and the pools may be strided in their first dimension.
    """
    (heads, width, size), tokens, c = state_pool.shape[1:], len(projected), constants
    inner, channels = heads * width, c.taps.shape[1]
    groups = (channels - inner) // (2 * size)
    inputs = projected[:, inner : inner + channels]
    convolved = conv1d_prefill(inputs, c.taps, c.conv_bias, conv_pool, plan.table)
    # as_strided, because .view gives a single token another stride, and Triton would compile another kernel for that
    # stride.
    y = ssd_prefill(
        convolved.as_strided((tokens, heads, width), (channels, width, 1), 0),
        projected[:, inner + channels :],
        c.A,
        convolved.as_strided((tokens, groups, size), (channels, size, 1), inner),
        convolved.as_strided((tokens, groups, size), (channels, size, 1), inner + groups * size),
        c.D,
        state_pool,
        plan.table,
        dt_bias=c.dt_bias,
        dt_limits=c.dt_limits,
    )
    gate = projected[:, :inner]
    norm = (c.norm, c.eps, c.norm_groups, c.norm_before_gate)
    return gated_norm(y.view(tokens, inner), gate, *norm, dtype=projected.dtype)
