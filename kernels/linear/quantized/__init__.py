"""Projections with weights stored as integers: in Triton or native code where they apply, else in torch."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from baton.kernels.linear.quantized import cpu, native, reference
from baton.kernels.linear.quantized.forms import INTEGERS, Form, Groups
from baton.kernels.runtime import memory
from baton.kernels.runtime.triton import takes

__all__ = ["Form", "Groups", "Layout", "QuantizedWeight", "keep", "keeps", "linear", "look_up", "quantize"]

OUTPUTS_AT_ONCE = 1024

Layout: TypeAlias = Literal["triton", "native", "torch"]


class Implementation(Protocol):
    """The functions of a module that computes with the integers of reference.quantize in its own layout."""

    def packed(self, codes: Tensor, scales: Tensor, bits: int) -> Tensor: ...

    def linear(
        self, x: Tensor, data: Tensor, bits: int, outputs: int, bias: Tensor | None, out: Tensor | None
    ) -> Tensor: ...

    def look_up(
        self, tokens: Tensor, data: Tensor, bits: int, shape: tuple[int, int], dtype: torch.dtype
    ) -> Tensor: ...


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight [outputs, inputs] as integers."""

    data: Tensor  # uint8, in `layout`
    form: Form
    outputs: int
    inputs: int
    dtype: torch.dtype  # dtype of the original weight, and of the rows that look_up returns
    layout: Layout  # the implementation that packed the data and computes with it
    rounds_inputs: bool = False  # whether projections compute linear.int8_activations; only of the native layout


def quantize(weight: Tensor, bits: int) -> QuantizedWeight:
    """Compute reference.quantize, a few outputs at a time, so that little more memory than the result is needed.

    weight: [outputs, inputs].
    """
    layout = _layout(weight)
    parts = [_packed(layout, *reference.quantize(part, bits), bits) for part in torch.split(weight, OUTPUTS_AT_ONCE)]
    outputs, inputs = weight.shape
    return QuantizedWeight(memory.joined(parts), INTEGERS[bits], outputs, inputs, weight.dtype, layout)


def keep(parts: Iterable[Groups], form: Form, outputs: int, inputs: int, dtype: torch.dtype) -> QuantizedWeight:
    """Pack a weight whose integers are those of a file, for native code. Only if `keeps` returned True.

    parts: consecutive rows; all but the last have a number of rows that native.BLOCK divides.
    inputs: without padding. dtype: of the rows that look_up returns.
    """
    data, at = memory.empty(*native.shape_of(outputs, inputs, form), dtype=torch.uint8), 0
    for part in parts:
        packed = native.packed(part)
        data[at : at + len(packed)] = packed
        at += len(packed)
    assert at == len(data)
    return QuantizedWeight(data, form, outputs, inputs, dtype, "native")


def keeps(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether an implementation computes with integers of any form, for inputs of this dtype and device."""
    return native.takes(torch.empty(0, dtype=dtype, device=device))


def linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Compute reference.linear with the weight's implementation.

    out: where to write the result, such as columns of a wider tensor; None for a new tensor.
    """
    if weight.layout == "native":
        return native.linear(x, weight.data, weight.form, weight.outputs, bias, out)
    return _by(weight.layout).linear(x, weight.data, weight.form.bits, weight.outputs, bias, out)


def look_up(tokens: Tensor, weight: QuantizedWeight) -> Tensor:
    """Compute reference.look_up with the weight's implementation."""
    shape = weight.outputs, weight.inputs
    if weight.layout == "native":
        return native.look_up(tokens, weight.data, weight.form, shape, weight.dtype)
    return _by(weight.layout).look_up(tokens, weight.data, weight.form.bits, shape, weight.dtype)


def _layout(weight: Tensor) -> Layout:
    if takes(weight):
        return "triton"
    return "native" if native.takes(weight) else "torch"


def _packed(layout: Layout, codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    if layout == "native":
        return native.packed(reference.grouped(codes, scales, bits))
    return _by(layout).packed(codes, scales, bits)


def _by(layout: Literal["triton", "torch"]) -> Implementation:
    if layout == "triton":
        from baton.kernels.linear.quantized import triton

        return triton
    return cpu
