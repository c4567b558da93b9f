"""Projections with weights stored as integers: in Triton or native code where they apply, else in torch."""

from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from baton.kernels.linear.quantized import cpu, native, reference
from baton.kernels.runtime.triton import takes

__all__ = ["Layout", "QuantizedWeight", "linear", "look_up", "quantize"]

OUTPUTS_AT_ONCE = 1024

Layout: TypeAlias = Literal["triton", "native", "torch"]


class Implementation(Protocol):
    """The functions that a module provides for its layout of packed integers."""

    def packed(self, codes: Tensor, scales: Tensor, bits: int) -> Tensor: ...

    def linear(
        self, x: Tensor, data: Tensor, bits: int, outputs: int, bias: Tensor | None, out: Tensor | None
    ) -> Tensor: ...

    def look_up(
        self, tokens: Tensor, data: Tensor, bits: int, shape: tuple[int, int], dtype: torch.dtype
    ) -> Tensor: ...


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight [outputs, inputs] as integers of 8 or 4 bits."""

    data: Tensor  # uint8, in `layout`
    bits: int
    outputs: int
    inputs: int
    dtype: torch.dtype  # dtype of the original weight, and of the rows that look_up returns
    layout: Layout  # the implementation that packed the data and computes with it


def quantize(weight: Tensor, bits: int) -> QuantizedWeight:
    """Compute reference.quantize, a few outputs at a time, so that little more memory than the result is needed.

    weight: [outputs, inputs].
    """
    layout = _layout(weight)
    pack = _by(layout).packed
    parts = [pack(*reference.quantize(part, bits), bits) for part in torch.split(weight, OUTPUTS_AT_ONCE)]
    outputs, inputs = weight.shape
    return QuantizedWeight(torch.cat(parts), bits, outputs, inputs, weight.dtype, layout)


def linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Compute reference.linear with the weight's implementation.

    out: where to write the result, such as columns of a wider tensor; None for a new tensor.
    """
    return _by(weight.layout).linear(x, weight.data, weight.bits, weight.outputs, bias, out)


def look_up(tokens: Tensor, weight: QuantizedWeight) -> Tensor:
    """Compute reference.look_up with the weight's implementation."""
    shape = weight.outputs, weight.inputs
    return _by(weight.layout).look_up(tokens, weight.data, weight.bits, shape, weight.dtype)


def _layout(weight: Tensor) -> Layout:
    if takes(weight):
        return "triton"
    return "native" if native.takes(weight) else "torch"


def _by(layout: Layout) -> Implementation:
    if layout == "triton":
        from baton.kernels.linear.quantized import triton

        return triton
    return native if layout == "native" else cpu
