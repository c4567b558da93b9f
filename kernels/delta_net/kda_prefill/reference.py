"""Kimi Delta Attention between its projections, over packed segments: made of operations that have a reference."""

import torch
from torch import Tensor
from torch.nn import functional as F

from baton.kernels.conv1d import reference as conv1d
from baton.kernels.delta_net.gated import unit_length
from baton.kernels.delta_net.kda import reference as kda
from baton.kernels.delta_net.kda_constants import KdaConstants
from baton.kernels.norm.gated import reference as norm
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
    """Convolution, delta rule, norm and gate: [T, H·Dv] in the dtype of `projected`; float32 throughout.

    projected: [T, channels + H], each token's q and k (H·Dk each), v (H·Dv), and its b (H); forget: [T, H·Dk]; gate:
    [T, H·Dv]. beta = σ(b), g = A·softplus(forget + dt_bias); q and k get unit length, and q is scaled by Dk^-½.
    conv_pool: float32 [slots, K-1, channels]; state_pool: [slots, H, Dv, Dk], float32 or bfloat16. Both hold each
    segment's state before its first token, afterwards that at its end, and in each checkpoint's slot that at its
    position; in between, states are not rounded.
    """
    (heads, width, size), tokens = state_pool.shape[1:], len(projected)
    inputs, b = torch.split(projected, [constants.taps.shape[1], heads], dim=-1)
    g = constants.A[:, None] * F.softplus(forget.float() + constants.dt_bias).view(tokens, heads, size)
    convolved = conv1d.conv1d_prefill(inputs, constants.taps, None, conv_pool, plan.conv)
    q, k, v = torch.split(convolved, [heads * size, heads * size, heads * width], dim=-1)
    o = kda.kda_scan(
        unit_length(q.view(tokens, heads, size)) * size**-0.5,
        unit_length(k.view(tokens, heads, size)),
        v.view(tokens, heads, width),
        g,
        b.float().sigmoid(),
        state_pool,
        plan.table,
    )
    y = norm.gated_norm(o.view(-1, width), gate.reshape(-1, width), constants.norm, constants.eps, 1, True, "sigmoid")
    return y.view(len(projected), -1).to(projected.dtype)
