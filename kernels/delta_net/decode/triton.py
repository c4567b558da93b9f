"""The operations of reference.py in Triton, in three launches each, also where rows feed drafts."""

from torch import Tensor

from baton.kernels.conv1d.triton_drafts import conv1d_drafts
from baton.kernels.conv1d.triton_update import conv1d_update
from baton.kernels.delta_net.constants import DeltaConstants, KdaConstants
from baton.kernels.delta_net.rule.triton_drafts import delta_update_drafts
from baton.kernels.delta_net.rule.triton_update import delta_update
from baton.kernels.drafts import Drafts, check_ring
from baton.kernels.norm.gated.triton import gated_norm


def delta_decode(
    projected: Tensor,
    constants: DeltaConstants,
    conv_pool: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    positions: Tensor,
) -> Tensor:
    """Compute reference.delta_decode. `projected` and the pools may be strided in their first dimension.

    Padding rows may share a slot that no other row has; the slot's contents and the results of padding rows are
    meaningless.
    """
    (heads, width, size), rows, c = state_pool.shape[1:], len(projected), constants
    inner, channels, keys = heads * width, c.taps.shape[1], c.key_heads * size
    convolved = conv1d_update(projected[:, inner : inner + channels], c.taps, c.conv_bias, conv_pool, slots)
    # as_strided, because .view gives a single row another stride, and Triton would compile another kernel for that
    # stride.
    o = delta_update(
        convolved.as_strided((rows, c.key_heads, size), (channels, size, 1), 0),
        convolved.as_strided((rows, c.key_heads, size), (channels, size, 1), keys),
        convolved.as_strided((rows, heads, width), (channels, width, 1), 2 * keys),
        projected[:, inner + channels + heads :],
        projected[:, inner + channels : inner + channels + heads],
        *(state_pool, slots, positions),
        A=c.A,
        dt_bias=c.dt_bias,
        beta_scale=c.beta_scale,
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
    """Compute reference.kda_decode. The projections and the pools may be strided in their first dimension.

    Padding rows may share a slot that no other row has; the slot's contents and the results of padding rows are
    meaningless.
    """
    (heads, width, size), rows, c = state_pool.shape[1:], len(projected), constants
    channels, keys = c.taps.shape[1], heads * size
    convolved = conv1d_update(projected[:, :channels], c.taps, None, conv_pool, slots)
    # as_strided, because .view gives a single row another stride, and Triton would compile another kernel for that
    # stride.
    o = delta_update(
        convolved.as_strided((rows, heads, size), (channels, size, 1), 0),
        convolved.as_strided((rows, heads, size), (channels, size, 1), keys),
        convolved.as_strided((rows, heads, width), (channels, width, 1), 2 * keys),
        forget.as_strided((rows, heads, size), (forget.stride(0), size, 1)),
        projected[:, channels:],
        *(state_pool, slots, positions),
        A=c.A,
        dt_bias=c.dt_bias,
        lower_bound=c.lower_bound,
    )
    o = o.view(rows, heads * width)
    return gated_norm(o, gate, c.norm, c.eps, heads, True, "sigmoid", dtype=projected.dtype)


def delta_decode_drafts(
    projected: Tensor,
    constants: DeltaConstants,
    conv_pool: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    positions: Tensor,
    drafts: Drafts,
    ring: Tensor,
) -> Tensor:
    """Compute the tokens of rows with drafts, see drafts/reference.py:decode_drafts. The host reads no tensor.

    The numbers of a captured step may be larger than those of its rows, see Drafts. `projected` and the pools may be
    strided in their first dimension.
    """
    (heads, width, _), c = state_pool.shape[1:], constants
    inner, columns = heads * width, c.taps.shape[1] + 2 * heads
    check_ring(drafts, ring, columns, projected.dtype)
    inputs, gate = projected[:, inner : inner + columns], projected[:, :inner]
    convolved = conv1d_drafts(inputs, None, c.taps, c.conv_bias, conv_pool, slots, drafts, ring)
    where = (state_pool, slots, positions, drafts, len(projected))
    o = delta_update_drafts(convolved, c.key_heads, c.A, c.dt_bias, c.beta_scale, None, *where)
    return gated_norm(o, gate, c.norm, c.eps, heads, norm_before_gate=True, dtype=projected.dtype)


def kda_decode_drafts(
    projected: Tensor,
    forget: Tensor,
    gate: Tensor,
    constants: KdaConstants,
    conv_pool: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    positions: Tensor,
    drafts: Drafts,
    ring: Tensor,
) -> Tensor:
    """Compute the tokens of rows with drafts, see drafts/reference.py:decode_drafts. The host reads no tensor.

    The numbers of a captured step may be larger than those of its rows, see Drafts. The projections and the pools may
    be strided in their first dimension.
    """
    (heads, _, size), c = state_pool.shape[1:], constants
    columns = c.taps.shape[1] + heads
    check_ring(drafts, ring, columns + heads * size, projected.dtype)
    convolved = conv1d_drafts(projected[:, :columns], forget, c.taps, None, conv_pool, slots, drafts, ring)
    where = (state_pool, slots, positions, drafts, len(projected))
    o = delta_update_drafts(convolved, heads, c.A, c.dt_bias, 1.0, c.lower_bound, *where)
    return gated_norm(o, gate, c.norm, c.eps, heads, True, "sigmoid", dtype=projected.dtype)
