"""Projections by a weight [outputs, inputs], and rows of it."""

from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weightᵀ + bias, computed in float32, in weight's dtype; x: [T, inputs] → [T, outputs]; bias: [outputs]."""
    y = x.float() @ weight.float().t()
    return (y if bias is None else y + bias.float()).to(weight.dtype)


def look_up(tokens: Tensor, weight: Tensor) -> Tensor:
    """weight[tokens]; tokens: int64 [T] → [T, inputs]."""
    return weight[tokens]
