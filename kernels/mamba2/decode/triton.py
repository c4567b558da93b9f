"""The operation of reference.py in Triton, in three launches, also where rows feed drafts."""

from collections.abc import Callable

from torch import Tensor

from baton.kernels.conv1d.triton_drafts import conv1d_drafts
from baton.kernels.conv1d.triton_update import conv1d_update
from baton.kernels.drafts import Drafts, check_ring
from baton.kernels.mamba2.constants import MixerConstants
from baton.kernels.mamba2.state_update.triton import selective_state_update
from baton.kernels.mamba2.state_update.triton_drafts import state_update_drafts
from baton.kernels.norm.gated.triton import gated_norm


def mixer_decode(
    projected: Tensor,
    constants: MixerConstants,
    conv_pool: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    positions: Tensor,
    update: Callable[..., Tensor] = selective_state_update,
) -> Tensor:
    """Compute reference.mixer_decode. `projected` and the pools may be strided in their first dimension.

    Padding rows may share a slot that no other row has; the slot's contents and the results of padding rows are
    meaningless.

    update: selective_state_update, or triton_replay.replay_state_update with its ring, places and starts bound.
    """
    (heads, width, size), rows, c = state_pool.shape[1:], len(projected), constants
    inner, channels = heads * width, c.taps.shape[1]
    groups = (channels - inner) // (2 * size)
    convolved = conv1d_update(projected[:, inner : inner + channels], c.taps, c.conv_bias, conv_pool, slots)
    # as_strided, because .view gives a single row another stride, and Triton would compile another kernel for that
    # stride.
    x = convolved.as_strided((rows, heads, width), (channels, width, 1), 0)
    B = convolved.as_strided((rows, groups, size), (channels, size, 1), inner)
    C = convolved.as_strided((rows, groups, size), (channels, size, 1), inner + groups * size)
    y = update(
        *(x, projected[:, inner + channels :], c.A, B, C, c.D, state_pool, slots, positions),
        dt_bias=c.dt_bias,
        dt_limits=c.dt_limits,
    )
    gate = projected[:, :inner]
    norm = (c.norm, c.eps, c.norm_groups, c.norm_before_gate)
    return gated_norm(y.view(rows, inner), gate, *norm, dtype=projected.dtype)


def mixer_decode_drafts(
    projected: Tensor,
    constants: MixerConstants,
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
    inner, channels = heads * width, c.taps.shape[1]
    check_ring(drafts, ring, channels + heads, projected.dtype)
    inputs = projected[:, inner : inner + channels + heads]
    convolved = conv1d_drafts(inputs, None, c.taps, c.conv_bias, conv_pool, slots, drafts, ring)
    y = state_update_drafts(convolved, c, state_pool, slots, positions, drafts, len(projected))
    norm = (c.norm, c.eps, c.norm_groups, c.norm_before_gate)
    return gated_norm(y, projected[:, :inner], *norm, dtype=projected.dtype)
