"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864), rotating halves."""

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [T, heads, head_dim], the first `width` of each head turned by its token's angles, the rest as it is.

    cos, sin: float32 [T, 1, width], of whose two halves the second repeats the first; width ≤ head_dim. Computed in
    float32, in x's dtype.
    """
    first, rest = x.tensor_split([cos.shape[-1]], dim=-1)
    low, high = first.float().chunk(2, dim=-1)
    turned = first * cos + torch.cat([-high, low], dim=-1) * sin
    return torch.cat([turned.to(x.dtype), rest], dim=-1)
