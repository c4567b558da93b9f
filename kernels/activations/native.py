"""The operation of reference.py in C++ (cpu.cpp)."""

from collections.abc import Callable

import torch
from torch import Tensor

from baton.kernels.activations import reference
from baton.kernels.runtime import cpp
from baton.kernels.runtime.cpp import INT, INT64, POINTER, TYPES
from baton.kernels.runtime.cpp.checks import assert_agrees

SIGMOID_GATE = "baton_sigmoid_gate"
SILU_MULTIPLY = "baton_silu_multiply"
SQUARED_RELU = "baton_squared_relu"


def takes(x: Tensor) -> bool:
    """Return whether the C functions of silu_multiply and squared_relu are installed and take this tensor."""
    return (
        cpp.function(SILU_MULTIPLY) is not None
        and cpp.function(SQUARED_RELU) is not None
        and x.device.type == "cpu"
        and x.dtype in TYPES
        and x.is_contiguous()
    )


def takes_gated(x: Tensor, gate: Tensor) -> bool:
    """Return whether the C function of sigmoid_gate is installed and takes these tensors."""
    return (
        cpp.function(SIGMOID_GATE) is not None
        and x.dtype == gate.dtype
        and x.dtype in TYPES
        and len(x) == len(gate)
        and x.shape[1] % gate.shape[1] == 0
        and all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in (x, gate))
    )


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Compute reference.sigmoid_gate; only for arguments that `takes_gated` accepts."""
    run = cpp.function(SIGMOID_GATE)
    assert run is not None
    y = torch.empty_like(x)
    run(TYPES[x.dtype], x.data_ptr(), gate.data_ptr(), y.data_ptr(), *gate.shape, x.shape[1] // gate.shape[1])
    return y


def silu_multiply(x: Tensor) -> Tensor:
    """Compute reference.silu_multiply; only for arguments that `takes` accepts."""
    run = cpp.function(SILU_MULTIPLY)
    assert run is not None
    rows, width = len(x), x.shape[1] // 2
    y = torch.empty(rows, width, dtype=x.dtype)
    run(TYPES[x.dtype], x.data_ptr(), y.data_ptr(), rows, width)
    return y


def squared_relu(x: Tensor) -> Tensor:
    """Compute reference.squared_relu; only for arguments that `takes` accepts."""
    run = cpp.function(SQUARED_RELU)
    assert run is not None
    y = torch.empty_like(x)
    run(TYPES[x.dtype], x.data_ptr(), y.data_ptr(), *x.shape)
    return y


def check_sigmoid_gate() -> None:
    """Raise AssertionError if the C function differs from the reference."""
    _check(lambda x: sigmoid_gate(x, x), lambda x: reference.sigmoid_gate(x, x))
    _check(lambda x: sigmoid_gate(x, x[:, :2].contiguous()), lambda x: reference.sigmoid_gate(x, x[:, :2]))


def check_silu_multiply() -> None:
    """Raise AssertionError if the C function differs from the reference."""
    _check(silu_multiply, reference.silu_multiply)


def check_squared_relu() -> None:
    """Raise AssertionError if the C function differs from the reference."""
    _check(squared_relu, reference.squared_relu)


def _check(found: Callable[[Tensor], Tensor], expected: Callable[[Tensor], Tensor]) -> None:
    """Raise AssertionError if two functions of one tensor differ."""
    x = torch.randn(3, 74, generator=torch.Generator().manual_seed(0))
    for dtype, tolerance in zip(TYPES, (1e-5, 2**-7), strict=True):
        assert_agrees(found(x.to(dtype)), expected(x.to(dtype)), rtol=tolerance, atol=1e-6)


cpp.declare(SIGMOID_GATE, [INT, POINTER, POINTER, POINTER, INT64, INT64, INT64], check_sigmoid_gate)
cpp.declare(SILU_MULTIPLY, [INT, POINTER, POINTER, INT64, INT64], check_silu_multiply)
cpp.declare(SQUARED_RELU, [INT, POINTER, POINTER, INT64, INT64], check_squared_relu)
