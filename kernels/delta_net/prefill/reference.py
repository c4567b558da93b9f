"""Delta net layers between their projections, over packed segments, composed of the operations' references."""

import torch
from torch import Tensor

from baton.kernels.conv1d import reference as conv1d
from baton.kernels.delta_net.constants import DeltaConstants, KdaConstants
from baton.kernels.delta_net.rule import reference as rule
from baton.kernels.delta_net.rule.reference import log_decays, unit_length
from baton.kernels.norm.gated import reference as norm
from baton.kernels.prefill.plan import PrefillPlan


def delta_prefill(
    projected: Tensor,
    constants: DeltaConstants,
    conv_pool: Tensor,
    state_pool: Tensor,
    plan: PrefillPlan,
) -> Tensor:
    """Run convolution, gated delta rule, norm and gate over packed segments: [T, Hv·Dv] in the dtype of `projected`.

    Computed in float32. Both pools are updated in place: each segment's slot is read as the state before its first
    token and receives the state at its end; each checkpoint's slot receives the state at its position. States are
    rounded only on these writes, not between chunks.

    projected: [T, Hv·Dv + channels + 2·Hv], each token's gate z (Hv·Dv), q and k (Hk·Dk each), v (Hv·Dv), and its b and
        a (Hv each). beta = beta_scale·σ(b) and g = A·softplus(a + dt_bias). After the convolution q and k are
        normalised to unit length, and q is scaled by Dk^-½.
    conv_pool: float32 [slots, K-1, channels].
    state_pool: [slots, Hv, Dv, Dk], float32 or bfloat16.
    plan: the segments with their slots, checkpoints and chunks.
    """
    heads, width, size = state_pool.shape[1:]
    inner, channels, tokens = heads * width, constants.taps.shape[1], len(projected)
    gate, inputs, b, a = torch.split(projected, [inner, channels, heads, heads], dim=-1)
    beta = constants.beta_scale * b.float().sigmoid()
    g = log_decays(a.float() + constants.dt_bias, constants.A, None)
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
    """Run convolution, delta rule, norm and gate over packed segments: [T, H·Dv] in the dtype of `projected`.

    Computed in float32. Both pools are updated in place: each segment's slot is read as the state before its first
    token and receives the state at its end; each checkpoint's slot receives the state at its position. States are
    rounded only on these writes, not between chunks.

    projected: [T, channels + H], each token's q and k (H·Dk each), v (H·Dv), and its b (H). beta = σ(b). After the
        convolution q and k are normalised to unit length, and q is scaled by Dk^-½.
    forget: [T, H·Dk]; g = log_decays(forget + dt_bias, A, lower_bound).
    gate: [T, H·Dv], the output gate before the sigmoid.
    conv_pool: float32 [slots, K-1, channels].
    state_pool: [slots, H, Dv, Dk], float32 or bfloat16.
    plan: the segments with their slots, checkpoints and chunks.
    """
    (heads, width, size), tokens = state_pool.shape[1:], len(projected)
    inputs, b = torch.split(projected, [constants.taps.shape[1], heads], dim=-1)
    x = (forget.float() + constants.dt_bias).view(tokens, heads, size)
    g = log_decays(x, constants.A[:, None], constants.lower_bound)
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
