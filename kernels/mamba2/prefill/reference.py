"""The Mamba-2 mixer between its two projections, over packed segments, composed of its operations' references."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from baton.kernels.conv1d import reference as conv1d
from baton.kernels.mamba2.constants import MixerConstants
from baton.kernels.mamba2.ssd.reference import ssd_prefill
from baton.kernels.norm.gated import reference as norm
from baton.kernels.prefill.plan import PrefillPlan


def mixer_prefill(
    projected: Tensor,
    constants: MixerConstants,
    conv_pool: Tensor,
    state_pool: Tensor,
    plan: PrefillPlan,
    scan: Callable[..., Tensor] = ssd_prefill,
) -> Tensor:
    """Run convolution, recurrence, gate and norm over packed segments: [T, inner] in the dtype of `projected`.

    Computed in float32. Both pools are updated in place: each segment's slot is read as the state before its first
    token and receives the state at its end; each checkpoint's slot receives the state at its position. States are
    rounded only on these writes, not between chunks.

    projected: [T, inner + channels + H], each token's gate (inner), x (inner), B and C (G·N each), and dt (H).
    conv_pool: float32 [slots, K-1, channels].
    state_pool: [slots, H, P, N], float32 or bfloat16.
    plan: the segments with their slots, checkpoints and chunks.
    scan: the implementation of mamba2.ssd to use.
    """
    heads, width, size = state_pool.shape[1:]
    inner, channels, tokens = heads * width, constants.taps.shape[1], len(projected)
    gate, inputs, dt = torch.split(projected, [inner, channels, heads], dim=-1)
    dt = F.softplus(dt.float() + constants.dt_bias).clamp(*constants.dt_limits)
    convolved = conv1d.conv1d_prefill(inputs, constants.taps, constants.conv_bias, conv_pool, plan.conv)
    x, B, C = torch.split(convolved, [inner, (channels - inner) // 2, (channels - inner) // 2], dim=-1)
    y = scan(
        x.view(tokens, heads, width),
        dt,
        constants.A,
        B.view(tokens, -1, size),
        C.view(tokens, -1, size),
        constants.D,
        state_pool,
        plan.chunks,
    )
    of_norm = (constants.norm, constants.eps, constants.norm_groups, constants.norm_before_gate)
    y = norm.gated_norm(y.flatten(1), gate, *of_norm)
    return y.to(projected.dtype)
