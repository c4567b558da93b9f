"""Kimi Delta Attention between its projections, over packed segments: made of operations that have a reference."""

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
from baton.kernels.prefill.plan import PrefillPlan


class KdaParts(NamedTuple):
    """Forms of kernels.conv1d, kernels.delta_net.kda and kernels.norm.gated."""

    conv1d_prefill: Callable[..., Tensor]
    kda_scan: Callable[..., Tensor]
    gated_norm: Callable[..., Tensor]


REFERENCES = KdaParts(
    baton.kernels.conv1d.reference.conv1d_prefill,
    baton.kernels.delta_net.kda.reference.kda_scan,
    baton.kernels.norm.gated.reference.gated_norm,
)


def kda_prefill(
    projected: Tensor,
    forget: Tensor,
    gate: Tensor,
    constants: KdaConstants,
    conv_pool: Tensor,
    state_pool: Tensor,
    plan: PrefillPlan,
    parts: KdaParts = REFERENCES,
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
    convolved = parts.conv1d_prefill(inputs, constants.taps, None, conv_pool, plan.conv)
    q, k, v = torch.split(convolved, [heads * size, heads * size, heads * width], dim=-1)
    o = parts.kda_scan(
        unit_length(q.view(tokens, heads, size)) * size**-0.5,
        unit_length(k.view(tokens, heads, size)),
        v.view(tokens, heads, width),
        g,
        b.float().sigmoid(),
        state_pool,
        plan.table,
    )
    y = parts.gated_norm(o.view(-1, width), gate.reshape(-1, width), constants.norm, constants.eps, 1, True, "sigmoid")
    return y.view(len(projected), -1).to(projected.dtype)
