"""Kimi Delta Attention between its projections, a token a row: made of operations that have a reference."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import baton.kernels.conv1d.reference
import baton.kernels.delta_net.kda.reference
import baton.kernels.norm.gated.reference
from baton.kernels.delta_net.gated import unit_length
from baton.kernels.delta_net.kda_constants import KdaConstants


class KdaForms(NamedTuple):
    """Of kernels.conv1d, kernels.delta_net.kda and kernels.norm.gated."""

    conv1d_update: Callable[..., Tensor]
    kda_update: Callable[..., Tensor]
    gated_norm: Callable[..., Tensor]


REFERENCES = KdaForms(
    baton.kernels.conv1d.reference.conv1d_update,
    baton.kernels.delta_net.kda.reference.kda_update,
    baton.kernels.norm.gated.reference.gated_norm,
)


def kda_decode(
    projected: Tensor,
    forget: Tensor,
    gate: Tensor,
    constants: KdaConstants,
    conv_pool: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    positions: Tensor,
    forms: KdaForms = REFERENCES,
) -> Tensor:
    """Convolution, delta rule, norm and gate of one token a row: [R, H·Dv] in the dtype of `projected`.

    projected: [R, channels + H], forget: [R, H·Dk], gate: [R, H·Dv], as in kernels/delta_net/kda_prefill/reference.py.
    conv_pool: float32 [slots, K-1, channels]; state_pool: [slots, H, Dv, Dk], float32, or bfloat16 rounded by chance
    (kernels/state_pool/rounding.py); both are updated in place. slots: int64 [R], no two alike; positions: int64 [R].
    Computed in float32.
    """
    (heads, width, size), rows = state_pool.shape[1:], len(projected)
    inputs, b = torch.split(projected, [constants.taps.shape[1], heads], dim=-1)
    g = constants.A[:, None] * F.softplus(forget.float() + constants.dt_bias).view(rows, heads, size)
    convolved = forms.conv1d_update(inputs, constants.taps, None, conv_pool, slots)
    q, k, v = torch.split(convolved, [heads * size, heads * size, heads * width], dim=-1)
    q, k = unit_length(q.view(rows, heads, size)) * size**-0.5, unit_length(k.view(rows, heads, size))
    o = forms.kda_update(q, k, v.view(rows, heads, width), g, b.float().sigmoid(), state_pool, slots, positions)
    y = forms.gated_norm(o.view(-1, width), gate.reshape(-1, width), constants.norm, constants.eps, 1, True, "sigmoid")
    return y.view(len(projected), -1).to(projected.dtype)
