"""Feed-forward experts, of which each token has a few."""

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from baton.kernels.activations import reference

Activation: TypeAlias = Literal["silu_gated", "relu2"]
ACTIVATIONS = {"silu_gated": reference.silu_multiply, "relu2": reference.squared_relu}
PARTS: dict[Activation, int] = {"silu_gated": 2, "relu2": 1}
"""How many matrices a first projection is made of: gate and up, or up alone."""


def experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    input_linear: Tensor,
    output_linear: Tensor,
    activation: Activation,
) -> Tensor:
    """Σ_j weights[t, j] · output_linear[e] · activation(input_linear[e] · x_t) with e = chosen[t, j]: [T, D].

    x: [T, D]; chosen: int32 [T, k], no expert twice in a row; weights: float32 [T, k]. input_linear: [E, 2I, D], the
    rows of gate before those of up, and silu(gate)·up; or [E, I, D], and relu(up)². output_linear: [E, D, I]. An expert
    that there is not (-1, for padding) adds nothing. Computed in float32; what the activation gives is rounded to x's
    dtype, and so is the result.
    """
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(len(input_linear)):
        token, place = torch.where(chosen == expert)
        projected = x[token].float() @ input_linear[expert].float().t()
        hidden = ACTIVATIONS[activation](projected).to(x.dtype)
        y.index_add_(0, token, hidden.float() @ output_linear[expert].float().t() * weights[token, place, None])
    return y.to(x.dtype)
