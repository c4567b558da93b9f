"""Delta nets between their projections, over packed segments, composed of the references of their parts."""

import torch
from torch import Tensor
from torch.nn import functional as F

from baton.kernels.conv1d import reference as conv1d
from baton.kernels.delta_net.constants import DeltaConstants, KdaConstants
from baton.kernels.delta_net.rule import reference as rule
from baton.kernels.delta_net.rule.reference import unit_length
from baton.kernels.norm.gated import reference as norm
from baton.kernels.prefill.plan import PrefillPlan


def delta_prefill(
    projected: Tensor,
    constants: DeltaConstants,
    conv_pool: Tensor,
    state_pool: Tensor,
    plan: PrefillPlan,
) -> Tensor:
    """Convolution, gated delta rule, norm and gate: [T, Hv·Dv] in the dtype of `projected`; float32 throughout.

    projected: [T, Hv·Dv + channels + 2·Hv], each token's gate z (Hv·Dv), q and k (Hk·Dk each), v (Hv·Dv), and its b and
    a (Hv each). beta = σ(b), g = A·softplus(a + dt_bias); q and k get unit length, and q is scaled by Dk^-½.
    conv_pool: float32 [slots, K-1, channels]; state_pool: [slots, Hv, Dv, Dk], float32 or bfloat16. Both hold each
    segment's state before its first token, afterwards that at its end, and in each checkpoint's slot that at its
    position; in between, states are not rounded.
    """
    heads, width, size = state_pool.shape[1:]
    inner, channels, tokens = heads * width, constants.taps.shape[1], len(projected)
    gate, inputs, b, a = torch.split(projected, [inner, channels, heads, heads], dim=-1)
    beta, g = b.float().sigmoid(), constants.A * F.softplus(a.float() + constants.dt_bias)
    convolved = conv1d.conv1d_prefill(inputs, constants.taps, constants.conv_bias, conv_pool, plan.conv)
    q, k, v = torch.split(convolved, [(channels - inner) // 2, (channels - inner) // 2, inner], dim=-1)
    o = rule.delta_scan(
        unit_length(q.view(tokens, -1, size)) * size**-0.5,
        unit_length(k.view(tokens, -1, size)),
        v.view(tokens, heads, width),
        g,
        beta,
        state_pool,
        plan.table,
    )
    y = norm.gated_norm(o.view(-1, width), gate.reshape(-1, width), constants.norm, constants.eps, 1, True)
    return y.view(tokens, inner).to(projected.dtype)


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
    o = rule.delta_scan(
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
