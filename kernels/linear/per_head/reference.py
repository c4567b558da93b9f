"""Projections with a separate weight for each head."""

import torch
from torch import Tensor


def head_linear(x: Tensor, weight: Tensor, passed: int = 0) -> Tensor:
    """Project the first `inputs` columns of each head, and append the next `passed` columns unchanged.

    Return [T, H, outputs + passed] in weight's dtype; the product weight[h] @ x[t, h, :inputs] is computed in float32.

    x: [T, H, at least inputs + passed].
    weight: [H, outputs, inputs].
    passed: how many columns after the first `inputs` are copied to the end of the result.
    """
    inputs = weight.shape[2]
    y = torch.einsum("thi,hoi->tho", x[..., :inputs].float(), weight.float()).to(weight.dtype)
    return torch.cat([y, x[..., inputs : inputs + passed]], dim=-1)
