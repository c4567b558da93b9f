"""The operation of reference.py in C++ (cpu.cpp), over packed weights. The results are batch-invariant."""

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.kernels.linear.dense.native import packed
from baton.kernels.linear.per_head import reference
from baton.kernels.runtime import cpp, memory
from baton.kernels.runtime.cpp import INT, INT64, POINTER, TYPES
from baton.kernels.runtime.cpp.checks import assert_agrees

NAME = "baton_head_linear"
ARGUMENTS = [INT, POINTER, INT64, INT64, POINTER, POINTER, *(INT64,) * 5]


@dataclass(frozen=True)
class PackedHeads:
    """The weights [H, outputs, inputs] of all heads, each packed like the weight of a projection."""

    data: Tensor  # [H, blocks, steps, 32, k], see linear.dense.native.packed
    outputs: int
    inputs: int

    @property
    def numel(self) -> int:
        """The number of weights, without padding."""
        return len(self.data) * self.outputs * self.inputs


def takes(weight: Tensor) -> bool:
    """Return whether the C function is installed and takes weights of this device and dtype."""
    return weight.device.type == "cpu" and weight.dtype in TYPES and cpp.function(NAME) is not None


def pack(weight: Tensor) -> PackedHeads:
    """Pack the weights of all heads, [H, outputs, inputs]."""
    return PackedHeads(memory.stacked([packed(head) for head in weight]), *weight.shape[1:])


def head_linear(x: Tensor, weight: PackedHeads, passed: int = 0) -> Tensor:
    """Compute reference.head_linear with packed weights. Raise ValueError for other dtypes and layouts."""
    run = cpp.function(NAME)
    assert run is not None
    rows, heads, width = x.shape
    if x.dtype != weight.data.dtype or heads != len(weight.data) or width < weight.inputs + passed:
        raise ValueError(
            f"x is {tuple(x.shape)} of {x.dtype} for {len(weight.data)} heads of {weight.inputs} inputs in "
            f"{weight.data.dtype}, with {passed} passed columns after them"
        )
    if x.stride(2) != 1:
        x = x.contiguous()
    y = torch.empty(rows, heads, weight.outputs + passed, dtype=x.dtype)
    run(
        *(TYPES[x.dtype], x.data_ptr(), x.stride(0), x.stride(1), weight.data.data_ptr(), y.data_ptr()),
        *(rows, heads, weight.inputs, weight.outputs, passed),
    )
    return y


def check() -> None:
    """Raise AssertionError if the C function differs from the reference."""
    g = torch.Generator().manual_seed(0)
    for dtype, tolerance in zip(TYPES, (1e-4, 0.05), strict=True):
        x, weight = torch.randn(3, 2, 80, generator=g).to(dtype), torch.randn(2, 45, 71, generator=g).to(dtype)
        found, expected = head_linear(x, pack(weight), 7), reference.head_linear(x, weight, 7)
        assert_agrees(found, expected, rtol=tolerance, atol=tolerance)


cpp.declare(NAME, ARGUMENTS, check)
