"""Projections with one weight per head: native code with packed weights, else torch."""

from torch import Tensor

from baton.kernels.linear.per_head import cpu, native
from baton.kernels.linear.per_head.native import PackedHeads

__all__ = ["PackedHeads", "head_linear", "pack"]


def pack(weight: Tensor) -> PackedHeads | None:
    """Pack a weight [H, outputs, inputs]; return None if native code cannot compute with it."""
    return native.pack(weight) if native.takes(weight) else None


def head_linear(x: Tensor, weight: Tensor | PackedHeads, passed: int = 0) -> Tensor:
    """Compute reference.head_linear with the form for the weight's layout."""
    if isinstance(weight, PackedHeads):
        return native.head_linear(x, weight, passed)
    return cpu.head_linear(x, weight, passed)
