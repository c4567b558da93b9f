"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864) in its "rotate half" form."""

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first `width` columns of each head by its token's angles: [T, heads, head_dim] in x's dtype.

    Computed in float32. Column i is paired with column i + width / 2. Columns from `width` on are copied unchanged.

    x: [T, heads, head_dim].
    cos, sin: float32 [T, 1, width], width ≤ head_dim; the second half of the columns repeats the first.
    """
    first, rest = x.tensor_split([cos.shape[-1]], dim=-1)
    low, high = first.float().chunk(2, dim=-1)
    rotated = first * cos + torch.cat([-high, low], dim=-1) * sin
    return torch.cat([rotated.to(x.dtype), rest], dim=-1)
