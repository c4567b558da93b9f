"""Experts' weights laid out for what computes."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.kernels.linear.dense import PackedWeight, native as linear_native
from baton.kernels.linear.quantized import Layout, QuantizedWeight, quantize


@dataclass(frozen=True)
class PackedExperts:
    """The weights [E, parts·outputs, inputs] of all experts. data: [E·parts, …], each part as a projection's weight.

    bits: 8 or 4 of integers, None of numbers; layout: see QuantizedWeight.
    """

    data: Tensor
    parts: int
    outputs: int
    inputs: int
    bits: int | None
    dtype: torch.dtype
    layout: Layout

    @property
    def count(self) -> int:
        """Of experts."""
        return len(self.data) // self.parts

    @property
    def numel(self) -> int:
        return len(self.data) * self.outputs * self.inputs

    def part(self, index: int) -> PackedWeight | QuantizedWeight:
        if self.bits is None:
            return PackedWeight(self.data[index], self.outputs, self.inputs, with_rows=True)
        return QuantizedWeight(self.data[index], self.bits, self.outputs, self.inputs, self.dtype, self.layout)


def pack(weight: Tensor, parts: int, bits: int | None) -> PackedExperts | None:
    """None where plain is best. weight: [E, parts·outputs, inputs]; bits: integers of 8 or 4, None for numbers."""
    if bits is None:
        return pack_numbers(weight, parts) if linear_native.takes(weight) else None
    matrices = _matrices(weight, parts)
    layout = quantize(matrices[0], bits).layout
    data = _stacked(matrices, lambda matrix: quantize(matrix, bits).data)
    _, outputs, inputs = matrices.shape
    return PackedExperts(data, parts, outputs, inputs, bits, weight.dtype, layout)


def pack_numbers(weight: Tensor, parts: int) -> PackedExperts:
    """For native code."""
    matrices = _matrices(weight, parts)
    data = _stacked(matrices, linear_native.packed)
    _, outputs, inputs = matrices.shape
    return PackedExperts(data, parts, outputs, inputs, None, weight.dtype, "native")


def _matrices(weight: Tensor, parts: int) -> Tensor:
    """[E·parts, outputs, inputs]."""
    count, rows, inputs = weight.shape
    return weight.detach().reshape(count * parts, rows // parts, inputs)


def _stacked(matrices: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
    """What is made of each, without room for more than one of them beside the result."""
    first = make(matrices[0])
    data = first.new_empty(len(matrices), *first.shape)
    for index, matrix in enumerate(matrices):
        data[index] = make(matrix)
    return data
