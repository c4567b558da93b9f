"""The same as reference.py, by Triton: three launches."""

from torch import Tensor

from baton.kernels.conv1d.triton_update import conv1d_update
from baton.kernels.delta_net.constants import DeltaConstants, KdaConstants
from baton.kernels.delta_net.rule.triton_update import delta_update
from baton.kernels.norm.gated.triton import gated_norm


def delta_decode(
    projected: Tensor,
    constants: DeltaConstants,
    conv_pool: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    positions: Tensor,
) -> Tensor:
    """See reference.delta_decode. Rows of `projected` may lie apart, and slots.

    Padding rows may share a slot that no other row has: what is in it, and those rows of the result, mean nothing.
    """
    (heads, width, size), rows, c = state_pool.shape[1:], len(projected), constants
    inner, channels, keys = heads * width, c.taps.shape[1], c.key_heads * size
    convolved = conv1d_update(projected[:, inner : inner + channels], c.taps, c.conv_bias, conv_pool, slots)
    # Not .view, which gives a single row another stride, and so another kernel.
    o = delta_update(
        convolved.as_strided((rows, c.key_heads, size), (channels, size, 1), 0),
        convolved.as_strided((rows, c.key_heads, size), (channels, size, 1), keys),
        convolved.as_strided((rows, heads, width), (channels, width, 1), 2 * keys),
        projected[:, inner + channels + heads :],
        projected[:, inner + channels : inner + channels + heads],
        *(state_pool, slots, positions),
        A=c.A,
        dt_bias=c.dt_bias,
    )
    gate = projected[:, :inner]
    return gated_norm(o.view(rows, inner), gate, c.norm, c.eps, heads, norm_before_gate=True, dtype=projected.dtype)


def kda_decode(
    projected: Tensor,
    forget: Tensor,
    gate: Tensor,
    constants: KdaConstants,
    conv_pool: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    positions: Tensor,
) -> Tensor:
    """See reference.kda_decode. Rows of what is projected may lie apart, and slots.

    Padding rows may share a slot that no other row has: what is in it, and those rows of the result, mean nothing.
    """
    (heads, width, size), rows, c = state_pool.shape[1:], len(projected), constants
    channels, keys = c.taps.shape[1], heads * size
    convolved = conv1d_update(projected[:, :channels], c.taps, None, conv_pool, slots)
    # Not .view, which gives a single row another stride, and so another kernel.
    o = delta_update(
        convolved.as_strided((rows, heads, size), (channels, size, 1), 0),
        convolved.as_strided((rows, heads, size), (channels, size, 1), keys),
        convolved.as_strided((rows, heads, width), (channels, width, 1), 2 * keys),
        forget.as_strided((rows, heads, size), (forget.stride(0), size, 1)),
        projected[:, channels:],
        *(state_pool, slots, positions),
        A=c.A,
        dt_bias=c.dt_bias,
    )
    o = o.view(rows, heads * width)
    return gated_norm(o, gate, c.norm, c.eps, heads, True, "sigmoid", dtype=projected.dtype)
