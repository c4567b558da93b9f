"""The operation of reference.py in Triton: one program per token, for all its heads."""

import torch
from torch import Tensor
from triton import language as tl

from baton.kernels.runtime.triton import KernelConfig, by_shape, config_of, launch
from baton.kernels.runtime.triton.jit import jit
from baton.kernels.runtime.triton.layout import row_stride
from baton.kernels.runtime.triton.sizes import next_power_of_2


def rotate(x: Tensor, cos: Tensor, sin: Tensor, first: int = 0) -> Tensor:
    """Compute reference.rotate. x may be strided in its first dimension."""
    (_, heads, width), half = x.shape, cos.shape[2] // 2
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    config = _config(heads, width, x.device)
    launch(
        _rotate,
        (len(x),),
        *(x, cos, sin, y),
        config=config,
        HEADS=heads,
        WIDTH=width,
        HALF=half,
        FIRST=first,
        X_ROW=row_stride(x),
        BLOCK_HEADS=next_power_of_2(heads),
        BLOCK_HALF=next_power_of_2(half),
        BLOCK_REST=next_power_of_2(width - 2 * half),
    )
    return y


@by_shape
def _config(heads: int, width: int, device: torch.device) -> KernelConfig:
    return config_of("attention.rotary.rotate", f"heads={heads} width={width}", device, *candidates(heads, width))


def candidates(heads: int, width: int) -> list[KernelConfig]:
    """Return the configurations to choose from; the first, about 16 pairs per thread, is the default."""
    pairs = next_power_of_2(heads) * next_power_of_2(width // 2)
    default = min(16, max(1, pairs // 512))
    return [KernelConfig({}, default), *(KernelConfig({}, warps) for warps in (1, 2, 4, 8) if warps != default)]


@jit
def _rotate(
    x_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    FIRST: tl.constexpr,
    X_ROW: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Rotate all heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    cos_ptr += token * (2 * HALF)
    sin_ptr += token * (2 * HALF)
    source, target = x_ptr + token * X_ROW, y_ptr + token * (HEADS * WIDTH)
    rotate_row(source, cos_ptr, sin_ptr, target, HEADS, WIDTH, HALF, BLOCK_HEADS, BLOCK_HALF, BLOCK_REST, FIRST)


@jit
def rotate_row(
    x_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    FIRST: tl.constexpr = 0,
):
    """Copy all heads of a token from x_ptr to y_ptr, and rotate 2·HALF columns of each, from FIRST on, on the way.

    cos_ptr, sin_ptr: the token's angles. Their second half, a copy of the first, is not read.
    """
    heads, columns = tl.arange(0, BLOCK_HEADS)[:, None], tl.arange(0, BLOCK_HALF)[None, :]
    is_column = columns < HALF
    cos = tl.load(cos_ptr + columns, is_column, other=0.0)
    sin = tl.load(sin_ptr + columns, is_column, other=0.0)
    places, inside = heads * WIDTH + FIRST + columns, (heads < HEADS) & is_column
    low = tl.load(x_ptr + places, inside, other=0.0).to(tl.float32)
    high = tl.load(x_ptr + places + HALF, inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + places, (low * cos - high * sin).to(y_ptr.dtype.element_ty), inside)
    tl.store(y_ptr + places + HALF, (high * cos + low * sin).to(y_ptr.dtype.element_ty), inside)
    if WIDTH > 2 * HALF:
        others = tl.arange(0, BLOCK_REST)[None, :]
        columns = tl.where(others < FIRST, others, others + 2 * HALF)
        places, inside = heads * WIDTH + columns, (heads < HEADS) & (columns < WIDTH)
        tl.store(y_ptr + places, tl.load(x_ptr + places, inside, other=0.0), inside)
