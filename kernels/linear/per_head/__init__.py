"""Projections of each head by a weight of its own: by native code over packed weights, else by torch."""

from torch import Tensor

from baton.kernels.linear.per_head import cpu, native
from baton.kernels.linear.per_head.native import PackedHeads

__all__ = ["PackedHeads", "head_linear", "pack"]


def pack(weight: Tensor) -> PackedHeads | None:
    """None where plain is best. weight: [H, outputs, inputs]."""
    return native.pack(weight) if native.takes(weight) else None


def head_linear(x: Tensor, weight: Tensor | PackedHeads, passed: int = 0) -> Tensor:
    """See reference.head_linear."""
    if isinstance(weight, PackedHeads):
        return native.head_linear(x, weight, passed)
    return cpu.head_linear(x, weight, passed)
