"""The Mamba-2 mixer between its two projections, for one token of each row, composed of its operations' references."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from baton.kernels.conv1d import reference as conv1d
from baton.kernels.mamba2.constants import MixerConstants
from baton.kernels.mamba2.state_update.reference import selective_state_update
from baton.kernels.norm.gated import reference as norm


def mixer_decode(
    projected: Tensor,
    constants: MixerConstants,
    conv_pool: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    positions: Tensor,
    update: Callable[..., Tensor] = selective_state_update,
) -> Tensor:
    """Run convolution, recurrence, gate and norm for one token of each row: [R, inner] in the dtype of `projected`.

    Computed in float32. Both pools are updated in place.

    projected: [R, inner + channels + H], each row's gate (inner), x (inner), B and C (G·N each), and dt (H).
    conv_pool: float32 [slots, K-1, channels].
    state_pool: [slots, H, P, N], float32, or bfloat16 with stochastic rounding (kernels/state_pool/rounding.py).
    slots: int64 [R], all different.
    positions: int64 [R], the absolute position of each row's token, which seeds the rounding.
    update: the implementation of mamba2.state_update to use.
    """
    (heads, width, size), (rows, _) = state_pool.shape[1:], projected.shape
    inner, channels = heads * width, constants.taps.shape[1]
    gate, inputs, dt = torch.split(projected, [inner, channels, heads], dim=-1)
    dt = F.softplus(dt.float() + constants.dt_bias).clamp(*constants.dt_limits)
    convolved = conv1d.conv1d_update(inputs, constants.taps, constants.conv_bias, conv_pool, slots)
    x, B, C = torch.split(convolved, [inner, (channels - inner) // 2, (channels - inner) // 2], dim=-1)
    x, B, C = x.view(rows, heads, width), B.view(rows, -1, size), C.view(rows, -1, size)
    y = update(x, dt, constants.A, B, C, constants.D, state_pool, slots, positions)
    of_norm = (constants.norm, constants.eps, constants.norm_groups, constants.norm_before_gate)
    y = norm.gated_norm(y.flatten(1), gate, *of_norm)
    return y.to(projected.dtype)
