"""The operation of reference.py in Triton. Weights may be floating point or packed integers.

Pairs of a token and one of its experts are sorted by expert and cut into tiles; a program multiplies a tile with its
expert's weights. As in kernels/linear/quantized/triton.py, the products have outputs as their first dimension, and
the results are batch-invariant.
"""

from functools import cache

import torch
from torch import Tensor
from triton import language as tl

from baton.kernels.linear.quantized.triton import BLOCK, STEP, product
from baton.kernels.moe.experts.packed import PackedExperts
from baton.kernels.moe.experts.reference import PARTS, Activation
from baton.kernels.moe.experts.triton_sort import most_tiles, sort_pairs
from baton.kernels.runtime.triton import KernelConfig, by_shape, config_of, dot_precision, launch
from baton.kernels.runtime.triton.functions import silu
from baton.kernels.runtime.triton.jit import jit
from baton.kernels.runtime.triton.sizes import cdiv, next_power_of_2

ADDED = 1024
"""Outputs per program of the kernel that sums a token's experts."""


def experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    input_linear: Tensor | PackedExperts,
    output_linear: Tensor | PackedExperts,
    activation: Activation,
) -> Tensor:
    """Compute reference.experts. Products of float32 are exact unless kernels.runtime.triton.use_tf32(True) was called.

    input_linear, output_linear: plain tensors as in the reference, or both packed as integers.
    """
    x, chosen, weights = x.contiguous(), chosen.contiguous(), weights.contiguous()
    (rows, wide), top_k, parts = x.shape, chosen.shape[1], PARTS[activation]
    first, second = (
        stack.data if isinstance(stack, PackedExperts) else stack for stack in (input_linear, output_linear)
    )
    form = input_linear.form if isinstance(input_linear, PackedExperts) else None
    bits = form.bits if form else 0
    inner = input_linear.outputs if isinstance(input_linear, PackedExperts) else input_linear.shape[1] // parts
    count = input_linear.count if isinstance(input_linear, PackedExperts) else len(input_linear)
    pairs = rows * top_k
    config = _config(
        row_class(count, wide, inner, bits, x.dtype, top_k, rows), wide, inner, count, bits, x.dtype, x.device
    )
    tile_rows, tile_outs = config.blocks["BLOCK_ROWS"], config.blocks["BLOCK_OUT"]
    order, tiles = sort_pairs(chosen, count, tile_rows)
    hidden = torch.empty(pairs, inner, dtype=x.dtype, device=x.device)
    results = torch.empty(pairs, wide, dtype=torch.float32, device=x.device)
    y = torch.empty_like(x)
    sizes = {"WIDE": wide, "INNER": inner, "BITS": bits, "PRECISION": dot_precision()}
    most = most_tiles(pairs, count, tile_rows)
    grid = (cdiv(inner, tile_outs), most)
    launch(_project_in, grid, x, first, order, tiles, hidden, config=config, TOP_K=top_k, GATED=parts == 2, **sizes)
    grid = (cdiv(wide, tile_outs), most)
    launch(_project_out, grid, hidden, second, order, tiles, results, config=config, **sizes)
    config = _add_config(wide)
    grid = (rows, cdiv(wide, config.blocks["BLOCK"]))
    launch(
        _add_up,
        grid,
        results,
        chosen,
        weights,
        y,
        config=config,
        COUNT=count,
        TOP_K=top_k,
        WIDE=wide,
    )
    return y


def candidates(row_count: int, dtype: torch.dtype) -> list[KernelConfig]:
    """Return the configurations to choose from for tiles of `row_count` rows.

    All have at least 64 outputs and 4 warps: kernels/linear/quantized/triton.py says why.
    """
    if dtype == torch.float32:
        return [_sized(64, row_count, 32, warps, stages) for warps in (4, 8) for stages in (2, 3)]
    sizes = [(64, 4), (64, 8), (128, 4), (128, 8)]
    return [_sized(output_count, row_count, 64, warps, stages) for output_count, warps in sizes for stages in (2, 3, 4)]


def row_class(count: int, wide: int, inner: int, bits: int, dtype: torch.dtype, top_k: int, rows: int) -> int:
    """Return the number of rows of a tile, the only thing in which launches for different numbers of rows differ.

    Tiles have about as many rows as an expert gets on average. Float32 and widths that are no multiples of 16 get
    smaller tiles, because larger ones would not fit into registers.
    """
    row_count = next((most for most in (16, 32, 64) if rows * top_k <= most * count), 64 if bits else 128)
    return min(row_count, 32) if dtype == torch.float32 or wide % 16 or inner % 16 else row_count


@by_shape
def _config(
    row_count: int, wide: int, inner: int, count: int, bits: int, dtype: torch.dtype, device: torch.device
) -> KernelConfig:
    """Return the configuration of both projections for these shapes on this device. row_count: rows of a tile."""
    if dtype == torch.float32:
        default = _sized(64, row_count, 32, 8, 2)
    elif row_count > 64:
        default = _sized(128, row_count, 64, 8, 3)
    else:  # Unpacking 8-bit integers takes more registers than 4 warps have.
        default = _sized(64, row_count, 64, 8 if bits == 8 and row_count == 64 else 4, 3)
    shape = f"rows={row_count} wide={wide} inner={inner} experts={count} bits={bits} {dtype}"
    return config_of("moe.experts.experts", shape, device, default, *candidates(row_count, dtype))


@cache
def _add_config(wide: int) -> KernelConfig:
    """Return the configuration of _add_up."""
    return KernelConfig({"BLOCK": min(ADDED, next_power_of_2(wide))})


def _sized(output_count: int, row_count: int, input_count: int, warps: int, stages: int) -> KernelConfig:
    """Return a configuration of these sizes. kernels/linear/quantized/triton.py says why STAGES is a constexpr, too."""
    blocks = {"BLOCK_OUT": output_count, "BLOCK_ROWS": row_count, "BLOCK_IN": input_count, "STAGES": stages}
    return KernelConfig(blocks, warps, stages)


@jit
def _project_in(
    x_ptr,
    stack_ptr,
    order_ptr,
    tiles_ptr,
    hidden_ptr,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    WIDE: tl.constexpr,
    INNER: tl.constexpr,
    BITS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute hidden, [pairs in sorted order, INNER]: the first projection and the activation.

    Grid: tiles of outputs, tiles of pairs.
    """
    expert, first, rows = _tile(tiles_ptr)
    if rows == 0:
        return
    outs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    at = tl.arange(0, BLOCK_ROWS)
    inside, here = outs < INNER, at < rows
    token = tl.load(order_ptr + first + at, here, other=0) // TOP_K
    rows_ptr = x_ptr + token.to(tl.int64) * WIDE
    if GATED:
        gate = _product(
            stack_ptr, expert * 2, outs, inside, rows_ptr, here, INNER, WIDE, BITS, PRECISION, BLOCK_IN, STAGES
        )
        up = _product(
            stack_ptr, expert * 2 + 1, outs, inside, rows_ptr, here, INNER, WIDE, BITS, PRECISION, BLOCK_IN, STAGES
        )
        results = silu(gate) * up
    else:
        up = _product(stack_ptr, expert, outs, inside, rows_ptr, here, INNER, WIDE, BITS, PRECISION, BLOCK_IN, STAGES)
        positive = tl.maximum(up, 0.0, propagate_nan=tl.PropagateNan.ALL)
        results = positive * positive
    places = (first + at).to(tl.int64)[None, :] * INNER + outs[:, None]
    tl.store(hidden_ptr + places, results.to(hidden_ptr.dtype.element_ty), inside[:, None] & here[None, :])


@jit
def _project_out(
    hidden_ptr,
    stack_ptr,
    order_ptr,
    tiles_ptr,
    results_ptr,
    WIDE: tl.constexpr,
    INNER: tl.constexpr,
    BITS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute results, [pairs in their original order, WIDE]: the second projection, without the pairs' weights.

    Grid: tiles of outputs, tiles of pairs.
    """
    expert, first, rows = _tile(tiles_ptr)
    if rows == 0:
        return
    outs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    at = tl.arange(0, BLOCK_ROWS)
    inside, here = outs < WIDE, at < rows
    rows_ptr = hidden_ptr + (first + at).to(tl.int64) * INNER
    sums = _product(stack_ptr, expert, outs, inside, rows_ptr, here, WIDE, INNER, BITS, PRECISION, BLOCK_IN, STAGES)
    pair = tl.load(order_ptr + first + at, here, other=0)
    places = pair.to(tl.int64)[None, :] * WIDE + outs[:, None]
    tl.store(results_ptr + places, sums, inside[:, None] & here[None, :])


@jit
def _add_up(
    results_ptr,
    chosen_ptr,
    weights_ptr,
    y_ptr,
    COUNT: tl.constexpr,
    TOP_K: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up the weighted experts of a token, in the order of its choice. Grid: tokens, blocks of columns."""
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for place in range(TOP_K):
        pair = row * TOP_K + place
        expert = tl.load(chosen_ptr + pair)
        if (expert >= 0) & (expert < COUNT):
            results = tl.load(results_ptr + pair * WIDE + columns, columns < WIDE, other=0.0)
            total += results * tl.load(weights_ptr + pair)
    tl.store(y_ptr + row * WIDE + columns, total.to(y_ptr.dtype.element_ty), columns < WIDE)


@jit
def _tile(tiles_ptr):
    """Return the expert of the program's tile, its first pair in sorted order, and its number of pairs."""
    tile_ptr = tiles_ptr + tl.program_id(1) * 3
    return tl.load(tile_ptr), tl.load(tile_ptr + 1), tl.load(tile_ptr + 2)


@jit
def _product(
    stack_ptr,
    matrix,
    outs,
    inside,
    rows_ptr,
    here,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    BITS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Return the products, float32 [outs, rows], of one matrix of a stack and rows.

    stack_ptr: consecutive matrices [OUTPUTS, INPUTS]; matrix: the index of one matrix.
    BITS: 8 or 4 for packed integers, 0 for floating point.
    Other arguments: see kernels.linear.quantized.triton.product.
    """
    if BITS:
        STEPS: tl.constexpr = (INPUTS + STEP - 1) // STEP
        BYTES: tl.constexpr = (OUTPUTS + BLOCK - 1) // BLOCK * STEPS * BLOCK * (4 + STEP * BITS // 8)
        data_ptr = stack_ptr + matrix.to(tl.int64) * BYTES
        sums = product(data_ptr, outs, inside, rows_ptr, here, 0, STEPS, INPUTS, BITS, PRECISION, STAGES)
    else:
        within = tl.arange(0, BLOCK_IN)
        weight_ptr = stack_ptr + matrix.to(tl.int64) * (OUTPUTS * INPUTS)
        weight_ptr += outs[:, None] * INPUTS + within[None, :]
        x_ptr = rows_ptr[None, :] + within[:, None]
        sums = tl.zeros((outs.shape[0], here.shape[0]), tl.float32)
        for start in tl.range(0, INPUTS, BLOCK_IN, num_stages=STAGES):
            there = start + within < INPUTS
            weight = tl.load(weight_ptr + start, inside[:, None] & there[None, :], other=0.0)
            x = tl.load(x_ptr + start, here[None, :] & there[:, None], other=0.0)
            sums = tl.dot(weight, x, sums, input_precision=PRECISION)
    return sums
