"""Projections by weights packed for this CPU: for native code where it is installed, else for oneDNN, else plain."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from baton.kernels.linear.dense import cpu, native

__all__ = ["PackedWeight", "linear", "look_up", "pack"]


@dataclass(frozen=True)
class PackedWeight:
    """A weight [outputs, inputs] in another layout; with_rows: rows can be looked up in it."""

    data: Tensor
    outputs: int
    inputs: int
    with_rows: bool

    def plain(self) -> Tensor:
        """[outputs, inputs], as it was."""
        return look_up(torch.arange(self.outputs), self) if self.with_rows else self.data.to_dense()


def pack(weight: Tensor) -> PackedWeight | None:
    """None where plain is best. weight: [outputs, inputs]."""
    outputs, inputs = weight.shape
    if native.takes(weight):
        return PackedWeight(native.packed(weight), outputs, inputs, True)
    return PackedWeight(cpu.packed(weight), outputs, inputs, False) if cpu.takes(weight) else None


def linear(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None) -> Tensor:
    """See reference.linear."""
    if isinstance(weight, Tensor):
        return cpu.linear(x, weight, bias)
    if weight.with_rows:
        return native.linear(x, weight.data, weight.outputs, bias)
    return cpu.linear(x, weight.data, bias)


def look_up(tokens: Tensor, weight: Tensor | PackedWeight) -> Tensor:
    """See reference.look_up; ValueError for a packed weight without rows."""
    if isinstance(weight, Tensor):
        return F.embedding(tokens, weight)
    if not weight.with_rows:
        raise ValueError("rows cannot be looked up in oneDNN's layout")
    return native.look_up(tokens, weight.data, (weight.outputs, weight.inputs))
