"""Projections of each head by a weight of its own."""

import torch
from torch import Tensor


def head_linear(x: Tensor, weight: Tensor, passed: int = 0) -> Tensor:
    """weight[h] · the first numbers of x[t, h], and behind it the `passed` that follow these: [T, H, outputs + passed].

    x: [T, H, at least inputs + passed]; weight: [H, outputs, inputs]. Computed in float32, in weight's dtype.
    """
    inputs = weight.shape[2]
    y = torch.einsum("thi,hoi->tho", x[..., :inputs].float(), weight.float()).to(weight.dtype)
    return torch.cat([y, x[..., inputs : inputs + passed]], dim=-1)
