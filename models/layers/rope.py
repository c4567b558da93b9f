"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864), rotating halves."""

import torch
from torch import Tensor


class Rotation:
    """Cosines and sines of a step's positions: float32 [T, 1, head_dim]."""

    def __init__(self, positions: Tensor, head_dim: int, theta: float) -> None:
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
        angle = positions[:, None].float() * theta**-exponent
        angle = torch.cat([angle, angle], dim=-1)[:, None]
        self.cos, self.sin = angle.cos(), angle.sin()

    def apply(self, x: Tensor) -> Tensor:
        """x: [T, heads, head_dim], turned by its position."""
        low, high = x.float().chunk(2, dim=-1)
        return (x * self.cos + torch.cat([-high, low], dim=-1) * self.sin).to(x.dtype)
