"""The operations of reference.py in Triton: one program per BLOCK columns of a row."""

import torch
from torch import Tensor
from triton import language as tl

from baton.kernels.runtime.triton import KernelConfig, by_shape, config_of, launch
from baton.kernels.runtime.triton.functions import sigmoid, silu
from baton.kernels.runtime.triton.jit import jit
from baton.kernels.runtime.triton.layout import row_stride
from baton.kernels.runtime.triton.sizes import cdiv, next_power_of_2


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Compute reference.sigmoid_gate. x and gate may be strided in their first dimension."""
    rows, width = x.shape
    y = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    config = _config("sigmoid_gate", width, x.device)
    grid = (rows, cdiv(width, config.blocks["BLOCK"]))
    layout = {"ROW": row_stride(x), "GATE_ROW": row_stride(gate), "SHARED": width // gate.shape[1]}
    launch(_sigmoid_gate, grid, x, gate, y, config=config, WIDTH=width, **layout)
    return y


def silu_multiply(x: Tensor) -> Tensor:
    """Compute reference.silu_multiply. x may be strided in its first dimension."""
    return _launch("silu_multiply", _silu_multiply, x, x.shape[1] // 2)


def squared_relu(x: Tensor) -> Tensor:
    """Compute reference.squared_relu of x, [T, n], which may be strided in its first dimension."""
    return _launch("squared_relu", _squared_relu, x, x.shape[1])


@by_shape
def _config(name: str, width: int, device: torch.device) -> KernelConfig:
    return config_of(f"activations.{name}", f"width={width}", device, *candidates(width))


def candidates(width: int) -> list[KernelConfig]:
    """Return the configurations to choose from, the default first."""
    least = next_power_of_2(width)
    sizes = [(1024, 4), (1024, 2), (1024, 8), (2048, 4), (2048, 8), (512, 2), (512, 4), (4096, 8)]
    return [KernelConfig({"BLOCK": min(block, least)}, warps) for block, warps in sizes]


def _launch(name: str, kernel: object, x: Tensor, width: int) -> Tensor:
    """Launch a kernel of one input; width: columns of the result."""
    y = torch.empty(len(x), width, dtype=x.dtype, device=x.device)
    config = _config(name, width, x.device)
    grid = (len(x), cdiv(width, config.blocks["BLOCK"]))
    launch(kernel, grid, x, y, config=config, WIDTH=width, ROW=row_stride(x))
    return y


@jit
def _sigmoid_gate(
    x_ptr,
    gate_ptr,
    y_ptr,
    WIDTH: tl.constexpr,
    ROW: tl.constexpr,
    GATE_ROW: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute BLOCK columns of one row of sigmoid(gate)·x, in which SHARED columns share a gate."""
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    x = tl.load(x_ptr + row * ROW + columns, inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * GATE_ROW + columns // SHARED, inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * WIDTH + columns, (sigmoid(gate) * x).to(y_ptr.dtype.element_ty), inside)


@jit
def _silu_multiply(x_ptr, y_ptr, WIDTH: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr):
    """Compute BLOCK columns of one row of silu(gate)·up."""
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    gate = tl.load(x_ptr + row * ROW + columns, inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * ROW + WIDTH + columns, inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * WIDTH + columns, (silu(gate) * up).to(y_ptr.dtype.element_ty), inside)


@jit
def _squared_relu(x_ptr, y_ptr, WIDTH: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr):
    """Compute BLOCK columns of one row of relu(x)²."""
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    x = tl.load(x_ptr + row * ROW + columns, inside, other=0.0).to(tl.float32)
    x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(y_ptr + row * WIDTH + columns, (x * x).to(y_ptr.dtype.element_ty), inside)
