"""The operations of reference.py in Triton: five launches with one decay per head, six with one per channel."""

from torch import Tensor

from baton.kernels.conv1d.triton import conv1d_prefill
from baton.kernels.delta_net.constants import DeltaConstants, KdaConstants
from baton.kernels.delta_net.rule.triton import delta_scan
from baton.kernels.norm.gated.triton import gated_norm
from baton.kernels.prefill.plan import PrefillPlan


def delta_prefill(
    projected: Tensor, constants: DeltaConstants, conv_pool: Tensor, state_pool: Tensor, plan: PrefillPlan
) -> Tensor:
    """Compute reference.delta_prefill, with operands of products and intermediate results in the dtype of `projected`.

    Sums and states are float32. `projected` and the pools may be strided in their first dimension.
    """
    (heads, width, size), tokens, c = state_pool.shape[1:], len(projected), constants
    inner, channels, keys = heads * width, c.taps.shape[1], c.key_heads * size
    inputs = projected[:, inner : inner + channels]
    convolved = conv1d_prefill(inputs, c.taps, c.conv_bias, conv_pool, plan.table)
    # as_strided, because .view gives a single token another stride, and Triton would compile another kernel for that
    # stride.
    o = delta_scan(
        convolved.as_strided((tokens, c.key_heads, size), (channels, size, 1), 0),
        convolved.as_strided((tokens, c.key_heads, size), (channels, size, 1), keys),
        convolved.as_strided((tokens, heads, width), (channels, width, 1), 2 * keys),
        projected[:, inner + channels + heads :],
        projected[:, inner + channels : inner + channels + heads],
        *(state_pool, plan.table),
        A=c.A,
        dt_bias=c.dt_bias,
        beta_scale=c.beta_scale,
    )
    gate = projected[:, :inner]
    return gated_norm(o.view(tokens, inner), gate, c.norm, c.eps, heads, norm_before_gate=True, dtype=projected.dtype)


def kda_prefill(
    projected: Tensor,
    forget: Tensor,
    gate: Tensor,
    constants: KdaConstants,
    conv_pool: Tensor,
    state_pool: Tensor,
    plan: PrefillPlan,
) -> Tensor:
    """Compute reference.kda_prefill, with operands of products and intermediate results in the dtype of `projected`.

    Sums and states are float32. The projections and the pools may be strided in their first dimension.
    """
    (heads, width, size), tokens, c = state_pool.shape[1:], len(projected), constants
    channels, keys = c.taps.shape[1], heads * size
    convolved = conv1d_prefill(projected[:, :channels], c.taps, None, conv_pool, plan.table)
    # as_strided, because .view gives a single token another stride, and Triton would compile another kernel for that
    # stride.
    o = delta_scan(
        convolved.as_strided((tokens, heads, size), (channels, size, 1), 0),
        convolved.as_strided((tokens, heads, size), (channels, size, 1), keys),
        convolved.as_strided((tokens, heads, width), (channels, width, 1), 2 * keys),
        forget.as_strided((tokens, heads, size), (forget.stride(0), size, 1)),
        projected[:, channels:],
        *(state_pool, plan.table),
        A=c.A,
        dt_bias=c.dt_bias,
        lower_bound=c.lower_bound,
    )
    o = o.view(tokens, heads * width)
    return gated_norm(o, gate, c.norm, c.eps, heads, True, "sigmoid", dtype=projected.dtype)
