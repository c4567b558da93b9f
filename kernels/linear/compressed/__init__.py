"""Projections with weights of bfloat16 in 12 bits each, without loss: native code's, for steps limited by memory."""

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.kernels.linear.compressed import native

__all__ = ["CompressedWeight", "compress", "linear", "look_up"]


@dataclass(frozen=True)
class CompressedWeight:
    """A weight [outputs, inputs] of bfloat16, compressed."""

    data: Tensor  # uint8, as native.compressed returns it
    outputs: int
    inputs: int

    def plain(self) -> Tensor:
        """Return the weight as it was before: [outputs, inputs]."""
        return look_up(torch.arange(self.outputs), self)


def compress(weight: Tensor) -> CompressedWeight | None:
    """Compress a weight [outputs, inputs]; return None if that would not make products faster."""
    if not native.takes(weight):
        return None
    data = native.compressed(weight)
    return None if data is None else CompressedWeight(data, *weight.shape)


def linear(x: Tensor, weight: CompressedWeight, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Compute reference.linear, in `out` if it is given. The results have the bits of linear.dense."""
    return native.linear(x, weight.data, (weight.outputs, weight.inputs), bias, out)


def look_up(tokens: Tensor, weight: CompressedWeight) -> Tensor:
    """Compute reference.look_up."""
    return native.look_up(tokens, weight.data, (weight.outputs, weight.inputs))
