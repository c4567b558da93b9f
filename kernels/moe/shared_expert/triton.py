"""The operation of reference.py in Triton: one program per BLOCK columns of a row."""

import torch
from torch import Tensor
from triton import language as tl

from baton.kernels.runtime.triton import KernelConfig, by_shape, config_of, launch
from baton.kernels.runtime.triton.jit import jit
from baton.kernels.runtime.triton.layout import row_stride
from baton.kernels.runtime.triton.sizes import cdiv, next_power_of_2


def add_shared(routed: Tensor, shared: Tensor, gate: Tensor | None = None) -> Tensor:
    """Compute reference.add_shared. All tensors may be strided in their first dimension."""
    rows, width = routed.shape
    y = torch.empty(rows, width, dtype=routed.dtype, device=routed.device)
    config = _config(width, routed.device)
    launch(
        _add_shared,
        (rows, cdiv(width, config.blocks["BLOCK"])),
        *(routed, shared, gate, y),
        config=config,
        WIDTH=width,
        ROUTED_ROW=row_stride(routed),
        SHARED_ROW=row_stride(shared),
        GATE_ROW=0 if gate is None else row_stride(gate),
    )
    return y


@by_shape
def _config(width: int, device: torch.device) -> KernelConfig:
    return config_of("moe.shared_expert.add_shared", f"width={width}", device, *candidates(width))


def candidates(width: int) -> list[KernelConfig]:
    """Return the configurations to choose from, the default first."""
    least = next_power_of_2(width)
    sizes = [(1024, 4), (1024, 2), (1024, 8), (2048, 4), (2048, 8), (512, 2), (512, 4), (4096, 8)]
    return [KernelConfig({"BLOCK": min(block, least)}, warps) for block, warps in sizes]


@jit
def _add_shared(
    routed_ptr,
    shared_ptr,
    gate_ptr,
    y_ptr,
    WIDTH: tl.constexpr,
    ROUTED_ROW: tl.constexpr,
    SHARED_ROW: tl.constexpr,
    GATE_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute BLOCK columns of one row of y."""
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    routed = tl.load(routed_ptr + row * ROUTED_ROW + columns, inside, other=0.0).to(tl.float32)
    shared = tl.load(shared_ptr + row * SHARED_ROW + columns, inside, other=0.0).to(tl.float32)
    if gate_ptr is not None:
        gate = tl.load(gate_ptr + row * GATE_ROW).to(tl.float32)
        e = tl.exp(-tl.abs(gate))  # sigmoid whose exponential cannot overflow
        shared *= tl.where(gate >= 0, 1.0, e) / (1.0 + e)
    tl.store(y_ptr + row * WIDTH + columns, (routed + shared).to(y_ptr.dtype.element_ty), inside)
