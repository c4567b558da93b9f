"""What stands between the two projections of a feed-forward layer."""

from torch import Tensor
from torch.nn import functional as F


def silu_multiply(x: Tensor) -> Tensor:
    """silu(gate)·up of x = [gate, up]: [T, 2n] → [T, n], computed in float32, in x's dtype."""
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)², computed in float32, in x's dtype."""
    return F.relu(x.float()).square().to(x.dtype)
