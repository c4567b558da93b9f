"""Delta net layers between their projections, for one token of each row, composed of the operations' references."""

import torch
from torch import Tensor

from baton.kernels.conv1d import reference as conv1d
from baton.kernels.delta_net.constants import DeltaConstants, KdaConstants
from baton.kernels.delta_net.rule import reference as rule
from baton.kernels.delta_net.rule.reference import log_decays, unit_length
from baton.kernels.norm.gated import reference as norm


def delta_decode(
    projected: Tensor,
    constants: DeltaConstants,
    conv_pool: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    positions: Tensor,
) -> Tensor:
    """Run convolution, gated delta rule, norm and gate for one token of each row: [R, Hv·Dv], dtype of `projected`.

    Computed in float32. Both pools are updated in place.

    projected: [R, Hv·Dv + channels + 2·Hv], with the columns that prefill/reference.py:delta_prefill describes.
    conv_pool: float32 [slots, K-1, channels].
    state_pool: [slots, Hv, Dv, Dk], float32, or bfloat16 with stochastic rounding (kernels/state_pool/rounding.py).
    slots: int64 [R], all different.
    positions: int64 [R], the absolute position of each row's token, which seeds the rounding.
    """
    (heads, width, size), rows = state_pool.shape[1:], len(projected)
    inner, channels = heads * width, constants.taps.shape[1]
    gate, inputs, b, a = torch.split(projected, [inner, channels, heads, heads], dim=-1)
    beta = constants.beta_scale * b.float().sigmoid()
    g = log_decays(a.float() + constants.dt_bias, constants.A, None)
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
    """Run convolution, delta rule, norm and gate for one token of each row: [R, H·Dv] in the dtype of `projected`.

    Computed in float32. Both pools are updated in place.

    projected: [R, channels + H], with the columns that prefill/reference.py:kda_prefill describes.
    forget: [R, H·Dk], the inputs of the log decays, see log_decays.
    gate: [R, H·Dv], the output gate before the sigmoid.
    conv_pool: float32 [slots, K-1, channels].
    state_pool: [slots, H, Dv, Dk], float32, or bfloat16 with stochastic rounding (kernels/state_pool/rounding.py).
    slots: int64 [R], all different.
    positions: int64 [R], the absolute position of each row's token, which seeds the rounding.
    """
    (heads, width, size), rows = state_pool.shape[1:], len(projected)
    inputs, b = torch.split(projected, [constants.taps.shape[1], heads], dim=-1)
    x = (forget.float() + constants.dt_bias).view(rows, heads, size)
    g = log_decays(x, constants.A[:, None], constants.lower_bound)
    convolved = conv1d.conv1d_update(inputs, constants.taps, None, conv_pool, slots)
    q, k, v = torch.split(convolved, [heads * size, heads * size, heads * width], dim=-1)
    q, k = unit_length(q.view(rows, heads, size)) * size**-0.5, unit_length(k.view(rows, heads, size))
    o = rule.delta_update(q, k, v.view(rows, heads, width), g, b.float().sigmoid(), state_pool, slots, positions)
    y = norm.gated_norm(o.view(-1, width), gate.reshape(-1, width), constants.norm, constants.eps, 1, True, "sigmoid")
    return y.view(len(projected), -1).to(projected.dtype)
