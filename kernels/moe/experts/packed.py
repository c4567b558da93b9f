"""Experts' weights, packed in the layout of the form that computes with them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from baton.kernels.linear.dense import PackedWeight, native as linear_native
from baton.kernels.linear.quantized import Form, Groups, Layout, QuantizedWeight, quantize
from baton.kernels.linear.quantized.native import packed, shape_of
from baton.kernels.runtime import memory

M = TypeVar("M")


@dataclass(frozen=True)
class PackedExperts:
    """The packed weights [E, parts·outputs, inputs] of all experts of a layer."""

    data: Tensor  # [E·parts, …], each part packed as the weight of one projection
    parts: int  # matrices per expert, such as gate and up
    outputs: int
    inputs: int
    form: Form | None  # of quantized weights; None for floating point
    dtype: torch.dtype  # dtype of the weights before they were packed
    layout: Layout  # see QuantizedWeight
    rounds_inputs: bool = False  # see QuantizedWeight

    @property
    def count(self) -> int:
        """The number of experts."""
        return len(self.data) // self.parts

    @property
    def numel(self) -> int:
        """The number of weights, without padding."""
        return len(self.data) * self.outputs * self.inputs

    def part(self, index: int) -> PackedWeight | QuantizedWeight:
        """Return matrix `index`, which is expert · parts + part, as a projection's weight."""
        if self.form is None:
            return PackedWeight(self.data[index], self.outputs, self.inputs, with_rows=True)
        return QuantizedWeight(self.data[index], self.form, self.outputs, self.inputs, self.dtype, self.layout)


def pack(weight: Tensor, parts: int, bits: int | None) -> PackedExperts | None:
    """Pack the experts' weights; return None if no form computes with packed weights of this device and dtype.

    weight: [E, parts·outputs, inputs].
    bits: 8 or 4 quantizes to integers of that size, None keeps floating point.
    """
    if bits is None:
        return pack_numbers(weight, parts) if linear_native.takes(weight) else None
    matrices = _matrices(weight, parts)
    first = quantize(matrices[0], bits)
    data = _stacked(list(matrices), lambda matrix: quantize(matrix, bits).data)
    _, outputs, inputs = matrices.shape
    return PackedExperts(data, parts, outputs, inputs, first.form, weight.dtype, first.layout)


def keep(
    matrices: Iterable[tuple[int, Groups]], form: Form, shape: tuple[int, int, int], parts: int, dtype: torch.dtype
) -> PackedExperts:
    """Pack experts' weights whose integers are those of a file: see kernels.linear.quantized.keep.

    matrices: each index, expert · parts + part, with its matrix of this form.
    shape: the number of matrices, and their outputs and inputs.
    """
    count, outputs, inputs = shape
    data = memory.empty(count, *shape_of(outputs, inputs, form), dtype=torch.uint8)
    for index, matrix in matrices:
        data[index] = packed(matrix)
    return PackedExperts(data, parts, outputs, inputs, form, dtype, "native")


def pack_numbers(weight: Tensor, parts: int) -> PackedExperts:
    """Pack floating-point weights for native code. weight: [E, parts·outputs, inputs]."""
    matrices = _matrices(weight, parts)
    data = _stacked(list(matrices), linear_native.packed)
    _, outputs, inputs = matrices.shape
    return PackedExperts(data, parts, outputs, inputs, None, weight.dtype, "native")


def _matrices(weight: Tensor, parts: int) -> Tensor:
    """Return the weight as [E·parts, outputs, inputs]."""
    count, rows, inputs = weight.shape
    return weight.detach().reshape(count * parts, rows // parts, inputs)


def _stacked(matrices: Sequence[M], make: Callable[[M], Tensor]) -> Tensor:
    """Apply `make` to each matrix and stack the results; at most one result exists outside of the stack."""
    first = make(matrices[0])
    data = memory.empty(len(matrices), *first.shape, dtype=first.dtype, device=first.device)
    for index, matrix in enumerate(matrices):
        data[index] = make(matrix)
    return data
