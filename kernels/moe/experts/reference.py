"""Mixture of experts: each token passes through a few of many feed-forward experts."""

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from baton.kernels.activations import reference

Activation: TypeAlias = Literal["silu_gated", "relu2"]
ACTIVATIONS = {"silu_gated": reference.silu_multiply, "relu2": reference.squared_relu}
PARTS: dict[Activation, int] = {"silu_gated": 2, "relu2": 1}
"""Number of matrices that the first projection consists of: gate and up, or up alone."""


def experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    input_linear: Tensor,
    output_linear: Tensor,
    activation: Activation,
) -> Tensor:
    """Return Σ_j weights[t, j] · output_linear[e] · activation(input_linear[e] · x_t) with e = chosen[t, j]: [T, D].

    Computed in float32. The activation's result and the final result are rounded to x's dtype.

    x: [T, D].
    chosen: int32 [T, k], no expert twice in one row; -1 (padding) contributes nothing.
    weights: float32 [T, k].
    input_linear: [E, 2I, D] for silu(gate)·up, with the rows of gate first; [E, I, D] for relu(up)².
    output_linear: [E, D, I].
    """
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(len(input_linear)):
        token, place = torch.where(chosen == expert)
        projected = x[token].float() @ input_linear[expert].float().t()
        hidden = ACTIVATIONS[activation](projected).to(x.dtype)
        y.index_add_(0, token, hidden.float() @ output_linear[expert].float().t() * weights[token, place, None])
    return y.to(x.dtype)
