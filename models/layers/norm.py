"""RMS norm."""

import torch
from torch import Tensor, nn

from baton.kernels.norm.rms import add_rms_norm


class RMSNorm(nn.Module):
    """A norm: (offset + weight) · x / rms(x), computed in float32, with a result in the weight's dtype."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))
        self.eps, self.offset = eps, offset

    def forward(self, residual: Tensor, x: Tensor | None, multiplier: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return residual + multiplier·x (only residual if x is None), and the norm of this sum: [rows, size] each."""
        return add_rms_norm(residual, x, self.weight, self.eps, multiplier, self.offset)
