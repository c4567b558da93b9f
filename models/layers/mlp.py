"""Feed-forward layers. They ignore `step`: it is there so that blocks can call them like mixtures of experts."""

import torch
from torch import Tensor, nn

from baton.kernels.activations import silu_multiply, squared_relu
from baton.models.layers.linear import Linear
from baton.models.layers.step import BatchPlan


class SquaredReluMLP(nn.Module):
    """An MLP: down(relu(up(x))²)."""

    def __init__(self, hidden: int, intermediate: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.up_proj = Linear(hidden, intermediate, bias, dtype)
        self.down_proj = Linear(intermediate, hidden, bias, dtype)

    def forward(self, x: Tensor, step: BatchPlan | None = None) -> Tensor:
        projected: Tensor = self.down_proj(squared_relu(self.up_proj(x)))
        return projected


class GatedMLP(nn.Module):
    """An MLP: output(silu(gate)·up), where gate and up are the halves of one input projection."""

    def __init__(self, hidden: int, intermediate: int, dtype: torch.dtype, bias: bool = False) -> None:
        super().__init__()
        self.input_linear = Linear(hidden, 2 * intermediate, bias, dtype)
        self.output_linear = Linear(intermediate, hidden, bias, dtype)

    def forward(self, x: Tensor, step: BatchPlan | None = None) -> Tensor:
        projected: Tensor = self.output_linear(silu_multiply(self.input_linear(x)))
        return projected
