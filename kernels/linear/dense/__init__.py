"""Projections. On a CPU weights are packed for native code if it is installed, else for oneDNN if that is faster."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from baton.kernels.linear.dense import cpu, native

__all__ = ["PackedWeight", "linear", "look_up", "pack"]


@dataclass(frozen=True)
class PackedWeight:
    """A weight [outputs, inputs] in the layout of native code or of oneDNN."""

    data: Tensor
    outputs: int
    inputs: int
    with_rows: bool  # True: native code's layout, in which rows can be looked up; False: oneDNN's

    def plain(self) -> Tensor:
        """Return the weight as it was before packing: [outputs, inputs]."""
        return look_up(torch.arange(self.outputs), self) if self.with_rows else self.data.to_dense()


def pack(weight: Tensor) -> PackedWeight | None:
    """Pack a weight [outputs, inputs]; return None if its device and dtype have no faster layout."""
    outputs, inputs = weight.shape
    if native.takes(weight):
        return PackedWeight(native.packed(weight), outputs, inputs, True)
    return PackedWeight(cpu.packed(weight), outputs, inputs, False) if cpu.takes(weight) else None


def linear(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Compute reference.linear with the form for the weight's layout.

    out: where to write the result, such as columns of a wider tensor; None for a new tensor.
    """
    if isinstance(weight, Tensor):
        return cpu.linear(x, weight, bias, out)
    if weight.with_rows:
        return native.linear(x, weight.data, weight.outputs, bias, out)
    return cpu.linear(x, weight.data, bias, out)


def look_up(tokens: Tensor, weight: Tensor | PackedWeight) -> Tensor:
    """Compute reference.look_up with the form for the weight's layout. Raise ValueError for oneDNN's layout."""
    if isinstance(weight, Tensor):
        return F.embedding(tokens, weight)
    if not weight.with_rows:
        raise ValueError("rows cannot be looked up in oneDNN's layout")
    return native.look_up(tokens, weight.data, (weight.outputs, weight.inputs))
