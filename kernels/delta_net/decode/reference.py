"""Delta nets between their projections, for one token a row, composed of the references of their parts."""

import torch
from torch import Tensor
from torch.nn import functional as F

from baton.kernels.conv1d import reference as conv1d
from baton.kernels.delta_net.constants import DeltaConstants, KdaConstants
from baton.kernels.delta_net.rule import reference as rule
from baton.kernels.delta_net.rule.reference import unit_length
from baton.kernels.norm.gated import reference as norm


def delta_decode(
    projected: Tensor,
    constants: DeltaConstants,
    conv_pool: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    positions: Tensor,
) -> Tensor:
    """Convolution, gated delta rule, norm and gate of one token a row: [R, Hv·Dv] in the dtype of `projected`.

    projected: [R, Hv·Dv + channels + 2·Hv], columns as in kernels/delta_net/prefill/reference.py.
    conv_pool: float32 [slots, K-1, channels]; state_pool: [slots, Hv, Dv, Dk], float32, or bfloat16 rounded by chance
    (kernels/state_pool/rounding.py); both are updated in place. slots: int64 [R], no two alike; positions: int64 [R].
    Computed in float32.
    """
    (heads, width, size), rows = state_pool.shape[1:], len(projected)
    inner, channels = heads * width, constants.taps.shape[1]
    gate, inputs, b, a = torch.split(projected, [inner, channels, heads, heads], dim=-1)
    beta, g = b.float().sigmoid(), constants.A * F.softplus(a.float() + constants.dt_bias)
    convolved = conv1d.conv1d_update(inputs, constants.taps, constants.conv_bias, conv_pool, slots)
    q, k, v = torch.split(convolved, [(channels - inner) // 2, (channels - inner) // 2, inner], dim=-1)
    q, k = unit_length(q.view(rows, -1, size)) * size**-0.5, unit_length(k.view(rows, -1, size))
    o = rule.delta_update(q, k, v.view(rows, heads, width), g, beta, state_pool, slots, positions)
    y = norm.gated_norm(o.view(-1, width), gate.reshape(-1, width), constants.norm, constants.eps, 1, True)
    return y.view(rows, inner).to(projected.dtype)


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
    """Convolution, delta rule, norm and gate of one token a row: [R, H·Dv] in the dtype of `projected`.

    projected: [R, channels + H], forget: [R, H·Dk], gate: [R, H·Dv], as in kernels/delta_net/prefill/reference.py.
    conv_pool: float32 [slots, K-1, channels]; state_pool: [slots, H, Dv, Dk], float32, or bfloat16 rounded by chance
    (kernels/state_pool/rounding.py); both are updated in place. slots: int64 [R], no two alike; positions: int64 [R].
    Computed in float32.
    """
    (heads, width, size), rows = state_pool.shape[1:], len(projected)
    inputs, b = torch.split(projected, [constants.taps.shape[1], heads], dim=-1)
    g = constants.A[:, None] * F.softplus(forget.float() + constants.dt_bias).view(rows, heads, size)
    convolved = conv1d.conv1d_update(inputs, constants.taps, None, conv_pool, slots)
    q, k, v = torch.split(convolved, [heads * size, heads * size, heads * width], dim=-1)
    q, k = unit_length(q.view(rows, heads, size)) * size**-0.5, unit_length(k.view(rows, heads, size))
    o = rule.delta_update(q, k, v.view(rows, heads, width), g, b.float().sigmoid(), state_pool, slots, positions)
    y = norm.gated_norm(o.view(-1, width), gate.reshape(-1, width), constants.norm, constants.eps, 1, True, "sigmoid")
    return y.view(len(projected), -1).to(projected.dtype)
