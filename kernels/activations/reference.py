"""What stands between the two projections of a feed-forward layer, and the gate of a layer's output."""

from torch import Tensor
from torch.nn import functional as F


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """σ(gate)·x, of [T, n] each, computed in float32, in x's dtype."""
    return (gate.float().sigmoid() * x.float()).to(x.dtype)


def silu_multiply(x: Tensor) -> Tensor:
    """silu(gate)·up of x = [gate, up]: [T, 2n] → [T, n], computed in float32, in x's dtype."""
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)², computed in float32, in x's dtype."""
    return F.relu(x.float()).square().to(x.dtype)
