"""RMS norm."""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """weight · x / rms(x), computed in float32, in weight's dtype."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        scale = (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (x * scale * self.weight.float()).to(self.weight.dtype)
