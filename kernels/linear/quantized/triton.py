"""The operation of reference.py in Triton. Weights are read as integers and converted to floating point in registers.

Products have outputs as their first dimension, where tensor cores need at least 64, and rows as their second, where a
few suffice. The weight's shape alone fixes the order of the additions (_splits), so results are batch-invariant.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from triton import language as tl

from baton.kernels.linear.quantized.reference import GROUP
from baton.kernels.runtime.triton import KernelConfig, by_shape, config_of, dot_precision, launch
from baton.kernels.runtime.triton.jit import jit
from baton.kernels.runtime.triton.layout import row_stride

BLOCK: tl.constexpr = tl.constexpr(64)
"""Outputs of one packed block."""
STEP: tl.constexpr = tl.constexpr(2 * GROUP)
"""Inputs of one packed block."""
SPLIT_OUTPUTS = 32_768
"""Weights with fewer outputs are split along their inputs into about SPLIT_OUTPUTS sums, to occupy the whole GPU."""
LEAST_STEPS = 4
"""Minimum steps, of STEP inputs each, in a split."""
APART = 64
"""Up to this many rows, each split has its own program; with more rows, one program computes all splits of a tile."""
ADD_CONFIG = KernelConfig({"BLOCK_OUT": 512})
LOOK_UP_CONFIG = KernelConfig(warps=1)


def packed(codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Pack the results of reference.quantize: uint8 [ceil(outputs/64), ceil(inputs/128), bytes], padded with zeros.

    A block of 64 outputs and 128 inputs holds two bfloat16 scales for each output, then 16-bit words [outputs, words].
    A word holds one integer of each half of the inputs (8 bits) or of each quarter (4 bits), the first in the lowest
    bits. 2^(bits-1) is added to the integers so that they are unsigned.
    """
    outputs, groups = scales.shape
    block, blocks, steps = BLOCK.value, -(-outputs // BLOCK.value), -(-groups // 2)
    missing = blocks * block - outputs
    unsigned = F.pad(codes, (0, steps * STEP.value - codes.shape[1], 0, missing)).view(torch.uint8) + 2 ** (bits - 1)
    words = unsigned.view(blocks, block, steps, 16 // bits, -1).permute(0, 2, 1, 4, 3)
    if bits == 4:
        words = words[..., ::2] | words[..., 1::2] << 4
    pairs = F.pad(scales, (0, 2 * steps - groups, 0, missing)).view(blocks, block, steps, 2).transpose(1, 2)
    return torch.cat([pairs.contiguous().view(torch.uint8).flatten(2), words.flatten(2)], dim=2)


def linear(x: Tensor, data: Tensor, bits: int, outputs: int, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Compute reference.linear with packed data, in `out` if it is given. Raise ValueError if a shape does not fit.

    Products of float32 are exact unless use_tf32(True) was called.
    """
    x = x.contiguous()
    rows, inputs = x.shape
    if data.shape != data_shape(outputs, inputs, bits):
        raise ValueError(f"x is {tuple(x.shape)} for {tuple(data.shape)} of {bits} bits and {outputs} outputs")
    if out is not None and (out.shape != (rows, outputs) or out.dtype != x.dtype):
        raise ValueError(f"out is {tuple(out.shape)} of {out.dtype} for {rows} rows of {outputs} in {x.dtype}")
    y = torch.empty(rows, outputs, dtype=x.dtype, device=x.device) if out is None else out
    stride = row_stride(y)
    splits, steps = _splits(outputs, data.shape[1])
    is_apart = splits > 1 and rows <= APART
    sums = torch.empty(splits, rows, outputs, dtype=torch.float32, device=x.device) if is_apart else y
    config = _config(_most_rows(rows, x.dtype), inputs, outputs, bits, x.dtype, x.device)
    tiles = (-(-outputs // config.blocks["BLOCK_OUT"]), -(-rows // config.blocks["BLOCK_ROWS"]))
    launch(
        _project,
        (*tiles, splits if is_apart else 1),
        *(x, data, None if is_apart else bias, sums, rows),
        config=config,
        OUTPUTS=outputs,
        INPUTS=inputs,
        STRIDE=outputs if is_apart else stride,
        STEPS=data.shape[1],
        SPLIT_STEPS=steps,
        SPLITS=1 if is_apart else splits,
        BITS=bits,
        PRECISION=dot_precision(),
    )
    if is_apart:
        launch(
            _add_splits,
            (-(-outputs // ADD_CONFIG.blocks["BLOCK_OUT"]), rows),
            *(sums, bias, y, rows),
            config=ADD_CONFIG,
            OUTPUTS=outputs,
            STRIDE=stride,
            SPLITS=splits,
        )
    return y


def look_up(tokens: Tensor, data: Tensor, bits: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Compute reference.look_up in packed data.

    A token outside of the table gets NaN instead of an error, because the host does not read the tokens.

    shape: the weight's shape before it was packed, [outputs, inputs].
    """
    outputs, inputs = shape
    found = torch.empty(len(tokens), inputs, dtype=dtype, device=data.device)
    launch(
        _look_up,
        (len(tokens), data.shape[1]),
        *(tokens.contiguous(), data, found),
        config=LOOK_UP_CONFIG,
        OUTPUTS=outputs,
        INPUTS=inputs,
        STEPS=data.shape[1],
        BITS=bits,
    )
    return found


def data_shape(outputs: int, inputs: int, bits: int) -> tuple[int, int, int]:
    """Return the shape of packed data."""
    return -(-outputs // BLOCK.value), -(-inputs // STEP.value), BLOCK.value * (4 + STEP.value * bits // 8)


def row_class(dtype: torch.dtype, rows: int) -> tuple[int, bool]:
    """Return the class of a number of rows: within a class `linear` launches the same kernels, for any weight."""
    return _most_rows(rows, dtype), rows <= APART


def candidates(rows: int, dtype: torch.dtype) -> list[KernelConfig]:
    """Return the configurations of _project to choose from.

    All have at least 64 outputs and 4 warps. With fewer, Hopper's tensor cores add in another order, and the result
    would depend on the configuration, and so on the number of rows.
    """
    row_count = _most_rows(rows, dtype)
    if dtype == torch.float32:
        return [_sized(64, row_count, warps, stages) for warps in (4, 8) for stages in (2, 3, 4)]
    if rows > APART:
        sizes = [(64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3), (64, 128, 8, 2), (128, 128, 8, 2)]
        return [_sized(*size) for size in sizes]
    pairs = [(64, 4), (128, 4), (128, 8)]
    return [_sized(output_count, row_count, warps, stages) for output_count, warps in pairs for stages in (2, 3, 4)]


@by_shape
def _config(
    row_count: int, inputs: int, outputs: int, bits: int, dtype: torch.dtype, device: torch.device
) -> KernelConfig:
    """Return the configuration of _project for these shapes on this device.

    row_count: what _most_rows returns.
    """
    if dtype == torch.float32:
        default = _sized(64, 16, 4, 3) if row_count == 16 else _sized(64, row_count, 8, 3)
    else:
        default = _sized(128, 64, 8, 3) if row_count > APART else _sized(64, row_count, 4, 4 if row_count == 16 else 3)
    shape = f"rows={row_count} outputs={outputs} inputs={inputs} bits={bits} {dtype}"
    return config_of("linear.quantized.linear", shape, device, default, *candidates(row_count, dtype))


def _most_rows(rows: int, dtype: torch.dtype) -> int:
    """Round `rows` up to the row count that a configuration is chosen for: up to APART, the rows of a single tile."""
    sizes = (16,) if dtype == torch.float32 else (16, 32, APART)
    return next((most for most in sizes if rows <= most), 32 if dtype == torch.float32 else 2 * APART)


def _sized(output_count: int, row_count: int, warps: int, stages: int) -> KernelConfig:
    """Return a configuration of these sizes, which passes the number of stages to the kernel as STAGES, too.

    The kernel's loop must name num_stages: Triton otherwise pipelines only loads that feed a tl.dot directly.
    """
    return KernelConfig({"BLOCK_OUT": output_count, "BLOCK_ROWS": row_count, "STAGES": stages}, warps, stages)


def _splits(outputs: int, steps: int) -> tuple[int, int]:
    """Return how many splits the inputs are divided into, and the steps of each split."""
    most = max(1, min(SPLIT_OUTPUTS // outputs, steps // LEAST_STEPS))
    split_steps = -(-steps // most)
    return -(-steps // split_steps), split_steps


@jit
def _project(
    x_ptr,
    data_ptr,
    bias_ptr,
    y_ptr,
    rows,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    STRIDE: tl.constexpr,
    STEPS: tl.constexpr,
    SPLIT_STEPS: tl.constexpr,
    SPLITS: tl.constexpr,
    BITS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute a tile of y: the sum of SPLITS consecutive splits, beginning with the program's own.

    Grid: tiles of outputs, tiles of rows, splits. STRIDE: elements from a row of y to the next.
    """
    outs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    at = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside, here = outs < OUTPUTS, at < rows
    rows_ptr = x_ptr + at.to(tl.int64) * INPUTS
    start = tl.program_id(2) * SPLIT_STEPS
    total = tl.zeros((BLOCK_OUT, BLOCK_ROWS), tl.float32)
    for split in range(SPLITS):
        begin = start + split * SPLIT_STEPS
        end = min(begin + SPLIT_STEPS, STEPS)
        total += product(data_ptr, outs, inside, rows_ptr, here, begin, end, INPUTS, BITS, PRECISION, STAGES)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + outs, inside, other=0.0).to(tl.float32)[:, None]
    places = (tl.program_id(2) * rows + at).to(tl.int64)[None, :] * STRIDE + outs[:, None]
    tl.store(y_ptr + places, total.to(y_ptr.dtype.element_ty), inside[:, None] & here[None, :])


@jit
def product(
    data_ptr,
    outs,
    inside,
    rows_ptr,
    here,
    begin,
    end,
    INPUTS: tl.constexpr,
    BITS: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Return the products, float32 [outs, rows], of a packed weight and rows, summed over the steps [begin, end).

    data_ptr: the packed weight.
    outs: [outs], the indices of outputs; inside: whether each output exists.
    rows_ptr: [rows], pointers to each row's inputs; here: whether each row exists.
    """
    WORDS: tl.constexpr = STEP * BITS // 16
    BYTES: tl.constexpr = BLOCK * (4 + 2 * WORDS)
    PARTS: tl.constexpr = 8 // BITS
    STEPS: tl.constexpr = (INPUTS + STEP - 1) // STEP
    BLOCK_OUT: tl.constexpr = outs.shape[0]
    BLOCK_ROWS: tl.constexpr = here.shape[0]
    within = tl.arange(0, WORDS)
    first = data_ptr + (outs // BLOCK).to(tl.int64) * (STEPS * BYTES)
    scales_ptr = first.to(tl.pointer_type(tl.int32)) + outs % BLOCK
    words_ptr = (first + BLOCK * 4).to(tl.pointer_type(tl.int32))
    words_ptr = (words_ptr + outs % BLOCK * (WORDS // 2))[:, None] + tl.arange(0, WORDS // 2)[None, :]
    x_ptr = rows_ptr[None, :] + within[:, None]
    sums = tl.zeros((BLOCK_OUT, BLOCK_ROWS), tl.float32)
    for step in tl.range(begin, end, num_stages=STAGES):
        scales = tl.load(scales_ptr + step * (BYTES // 4), inside, other=0)
        words = tl.load(words_ptr + step * (BYTES // 4), inside[:, None], other=0)
        # A word holds 16 / BITS integers. Compute one product for each place in the words, as the inputs of the
        # integers at one place are consecutive in x. After each group of GROUP inputs, apply the group's scale.
        for place in tl.static_range(16 // BITS):
            k = step * STEP + place * WORDS
            x = tl.load(x_ptr + k, here[None, :] & (k + within[:, None] < INPUTS), other=0.0)
            if place % PARTS == 0:
                products = tl.zeros((BLOCK_OUT, BLOCK_ROWS), tl.float32)
            numbers = _numbers(words, place, BITS, x.dtype)
            products = tl.dot(numbers, x, products, input_precision=PRECISION)
            if place % PARTS == PARTS - 1:
                sums += products * _scale(scales, place // PARTS)[:, None]
    return sums


@jit
def _add_splits(
    sums_ptr,
    bias_ptr,
    y_ptr,
    rows,
    OUTPUTS: tl.constexpr,
    STRIDE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """Add up the splits, in the same order as _project does. Grid: tiles of outputs, rows.

    STRIDE: elements from a row of y to the next.
    """
    outs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    inside = outs < OUTPUTS
    row = tl.program_id(1).to(tl.int64)
    total = tl.zeros((BLOCK_OUT,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(sums_ptr + (split * rows + row) * OUTPUTS + outs, inside, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + outs, inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * STRIDE + outs, total.to(y_ptr.dtype.element_ty), inside)


@jit
def _look_up(
    tokens_ptr,
    data_ptr,
    found_ptr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    STEPS: tl.constexpr,
    BITS: tl.constexpr,
):
    """Dequantize STEP inputs of a token's row. Grid: tokens, steps of inputs."""
    WORDS: tl.constexpr = STEP * BITS // 16
    BYTES: tl.constexpr = BLOCK * (4 + 2 * WORDS)
    row, step = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tl.load(tokens_ptr + row).to(tl.int64)
    inside = (token >= 0) & (token < OUTPUTS)
    first = data_ptr + (token // BLOCK * STEPS + step) * BYTES
    scales = tl.load(first.to(tl.pointer_type(tl.int32)) + token % BLOCK, inside, other=0)
    within = tl.arange(0, WORDS)[None, :]
    words_ptr = (first + BLOCK * 4).to(tl.pointer_type(tl.int32)) + token % BLOCK * (WORDS // 2)
    words = tl.load(words_ptr + tl.arange(0, WORDS // 2)[None, :], inside, other=0)
    for place in tl.static_range(16 // BITS):
        values = _numbers(words, place, BITS, tl.float32) * _scale(scales, place * BITS // 8)
        columns = step * STEP + place * WORDS + within
        values = tl.where(inside, values, float("nan")).to(found_ptr.dtype.element_ty)
        tl.store(found_ptr + row * INPUTS + columns, values, columns < INPUTS)


@jit
def _numbers(words, PLACE: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """Return the integers at place PLACE of all words, divided by 64, exactly: [outputs, 2·words].

    words: int32 [outputs, words], two 16-bit words each.

    For bfloat16, the bits of an integer are interpreted as a denormal bfloat16, a multiple of 2^-133, and scaled up. So
    the two words in 32 bits are converted together.
    """
    SHIFT: tl.constexpr = PLACE * BITS % 8
    MASK: tl.constexpr = 2**BITS - 1 << SHIFT
    LESS: tl.constexpr = 2**BITS / 128
    bits = (words >> 8 if PLACE * BITS >= 8 else words) & (MASK * 0x10001)
    if DTYPE.is_bf16():
        FACTOR: tl.constexpr = 2.0 ** (127 - SHIFT)
        low = bits.to(tl.int16).to(DTYPE, bitcast=True) * FACTOR - LESS
        high = (bits >> 16).to(tl.int16).to(DTYPE, bitcast=True) * FACTOR - LESS
    else:
        PART: tl.constexpr = 2.0 ** (-6 - SHIFT)
        low = (bits & MASK).to(DTYPE) * PART - LESS
        high = (bits >> 16).to(DTYPE) * PART - LESS
    return tl.join(low, high).reshape(words.shape[0], 2 * words.shape[1])


@jit
def _scale(pair, WHICH: tl.constexpr):
    """Return 64 times one of the two bfloat16 scales in 32 bits. The 64 undoes the division in _numbers."""
    return (pair & -0x10000 if WHICH else pair << 16).to(tl.float32, bitcast=True) * 64.0
