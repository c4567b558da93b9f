"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864) in its "rotate half" form."""

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, first: int = 0) -> Tensor:
    """Rotate `width` columns of each head, from `first` on, by its token's angles: [T, heads, head_dim] in x's dtype.

    Computed in float32. Each of the first width / 2 of these columns is paired with the one width / 2 after it. Other
    columns are copied unchanged.

    x: [T, heads, head_dim].
    cos, sin: float32 [T, 1, width], first + width ≤ head_dim; the second half of the columns repeats the first.
    """
    before, turned, after = x.tensor_split([first, first + cos.shape[-1]], dim=-1)
    low, high = turned.float().chunk(2, dim=-1)
    rotated = turned * cos + torch.cat([-high, low], dim=-1) * sin
    return torch.cat([before, rotated.to(x.dtype), after], dim=-1)
