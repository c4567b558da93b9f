"""Projections with a weight [outputs, inputs], and embedding look-up in such a weight."""

from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x @ weightᵀ + bias, [T, outputs] in weight's dtype, computed in float32.

    x: [T, inputs]. weight: [outputs, inputs]. bias: [outputs] or None.
    """
    y = x.float() @ weight.float().t()
    return (y if bias is None else y + bias.float()).to(weight.dtype)


def look_up(tokens: Tensor, weight: Tensor) -> Tensor:
    """Return weight[tokens], [T, inputs]; tokens: int64 [T]."""
    return weight[tokens]
