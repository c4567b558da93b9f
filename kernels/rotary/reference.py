"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864), rotating halves."""

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [T, heads, head_dim], each head turned by its token's angles; computed in float32, in x's dtype.

    cos, sin: float32 [T, 1, head_dim], of whose two halves the second repeats the first.
    """
    low, high = x.float().chunk(2, dim=-1)
    return (x * cos + torch.cat([-high, low], dim=-1) * sin).to(x.dtype)
