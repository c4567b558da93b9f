"""The Mamba-2 mixer between its two projections, over packed segments: made of the operations that have a reference."""

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
    """Convolution, recurrence, gate and norm: [T, inner] in the dtype of `projected`; float32 throughout.

    projected: [T, inner + channels + H], each token's gate, its x (inner), B and C (G·N each), and its dt.
    conv_pool: float32 [slots, K-1, channels]; state_pool: [slots, H, P, N], float32 or bfloat16. Both hold each
    segment's state before its first token, afterwards that at its end, and in each checkpoint's slot that at its
    position; in between, states are not rounded.
    scan: a form of kernels.mamba2.ssd.
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
