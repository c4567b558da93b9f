"""Feed-forward layers. They take a step, as mixtures of experts do, and need to know nothing of it."""

import torch
from torch import Tensor, nn

from baton.kernels.activations import silu_multiply, squared_relu
from baton.models.layers.linear import Linear
from baton.models.layers.step import BatchPlan


class SquaredReluMLP(nn.Module):
    """down(relu(up(x))²)."""

    def __init__(self, hidden: int, intermediate: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.up_proj = Linear(hidden, intermediate, bias, dtype)
        self.down_proj = Linear(intermediate, hidden, bias, dtype)

    def forward(self, x: Tensor, step: BatchPlan | None = None) -> Tensor:
        projected: Tensor = self.down_proj(squared_relu(self.up_proj(x)))
        return projected


class GatedMLP(nn.Module):
    """output(silu(gate)·up), gate and up being the halves of one input projection."""

    def __init__(self, hidden: int, intermediate: int, dtype: torch.dtype, bias: bool = False) -> None:
        super().__init__()
        self.input_linear = Linear(hidden, 2 * intermediate, bias, dtype)
        self.output_linear = Linear(intermediate, hidden, bias, dtype)

    def forward(self, x: Tensor, step: BatchPlan | None = None) -> Tensor:
        projected: Tensor = self.output_linear(silu_multiply(self.input_linear(x)))
        return projected
