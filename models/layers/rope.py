"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864), rotating halves."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines of a step's positions: float32 [T, 1, head_dim]."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, positions: Tensor, head_dim: int, theta: float) -> Self:
        """positions: int64 [T]."""
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
        angle = positions[:, None].float() * theta**-exponent
        angle = torch.cat([angle, angle], dim=-1)[:, None]
        return cls(angle.cos(), angle.sin())
