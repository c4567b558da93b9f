"""The operation of reference.py in Triton: one program per row, which reads the row once."""

import torch
from torch import Tensor
from triton import language as tl

from baton.kernels.runtime.triton import KernelConfig, by_shape, config_of, launch
from baton.kernels.runtime.triton.jit import jit
from baton.kernels.runtime.triton.sizes import next_power_of_2


def add_rms_norm(
    residual: Tensor, x: Tensor | None, weight: Tensor, eps: float, multiplier: float = 1.0, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Compute reference.add_rms_norm; all tensors are contiguous."""
    rows, hidden = residual.shape
    added = residual if x is None else torch.empty_like(residual)
    normed = torch.empty(rows, hidden, dtype=weight.dtype, device=residual.device)
    launch(
        _add_rms_norm,
        (rows,),
        *(residual, x, weight, added, normed),
        *(eps, multiplier, offset),
        config=_config(hidden, residual.device),
        HIDDEN=hidden,
        BLOCK=next_power_of_2(hidden),
    )
    return added, normed


@by_shape
def _config(hidden: int, device: torch.device) -> KernelConfig:
    return config_of("norm.rms.add_rms_norm", f"hidden={hidden}", device, *candidates(hidden))


def candidates(hidden: int) -> list[KernelConfig]:
    """Return the configurations to choose from, the default first."""
    default = 4 if hidden <= 4096 else 8
    return [KernelConfig({}, default), *(KernelConfig({}, warps) for warps in (1, 2, 4, 8, 16) if warps != default)]


@jit
def _add_rms_norm(
    residual_ptr,
    x_ptr,
    weight_ptr,
    added_ptr,
    normed_ptr,
    eps,
    multiplier,
    offset,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add and normalise one row. x_ptr None: nothing is added, and added_ptr is not written."""
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    places = tl.program_id(0).to(tl.int64) * HIDDEN + columns
    values = tl.load(residual_ptr + places, inside, other=0.0).to(tl.float32)
    if x_ptr is not None:
        values += tl.load(x_ptr + places, inside, other=0.0).to(tl.float32) * multiplier
        rounded = values.to(added_ptr.dtype.element_ty)
        tl.store(added_ptr + places, rounded, inside)
        values = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / HIDDEN + eps)
    weight = tl.load(weight_ptr + columns, inside, other=0.0).to(tl.float32)
    tl.store(normed_ptr + places, (values * scale * (weight + offset)).to(normed_ptr.dtype.element_ty), inside)
