"""The same as reference.py, by Triton: integers become numbers in registers, so a weight is read once, as it is kept.

Outputs are the first dimension of the products, of which tensor cores want 64; rows are the second, of which they take
few. The shape of the weight alone fixes the order of the sums (_splits), so a row gets the same beside any others.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from triton import language as tl

from baton.kernels.linear.quantized.reference import GROUP
from baton.kernels.runtime.triton import KernelConfig, config_of, dot_precision, launch
from baton.kernels.runtime.triton.jit import jit

BLOCK: tl.constexpr = tl.constexpr(64)
"""Outputs that lie together."""
STEP: tl.constexpr = tl.constexpr(2 * GROUP)
"""Inputs that lie together."""
SPLIT_OUTPUTS = 32_768
"""Weights with fewer outputs are split along their inputs, so that as many sums are made at once."""
LEAST_STEPS = 4
"""In a split."""
APART = 64
"""Most rows whose splits are summed by programs of their own; of more rows one program makes a tile of all splits."""
ADDED = 512
"""Outputs whose splits a program adds up."""


def packed(codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    """See reference.quantize → uint8 [ceil(outputs/64), ceil(inputs/128), bytes], padded with zeros.

    The bytes of 64 outputs and 128 inputs: two scales for each output, then words of 16 bits [outputs, words], which
    hold from the lowest bits on an integer of each half of the inputs, or with 4 bits of each quarter. Half of their
    range is added, so that none is negative.
    """
    outputs, groups = scales.shape
    block, blocks, steps = BLOCK.value, -(-outputs // BLOCK.value), -(-groups // 2)
    missing = blocks * block - outputs
    held = F.pad(codes, (0, steps * STEP.value - codes.shape[1], 0, missing)).view(torch.uint8) + 2 ** (bits - 1)
    laid = held.view(blocks, block, steps, 16 // bits, -1).permute(0, 2, 1, 4, 3)
    if bits == 4:
        laid = laid[..., ::2] | laid[..., 1::2] << 4
    pairs = F.pad(scales, (0, 2 * steps - groups, 0, missing)).view(blocks, block, steps, 2).transpose(1, 2)
    return torch.cat([pairs.contiguous().view(torch.uint8).flatten(2), laid.flatten(2)], dim=2)


def linear(x: Tensor, data: Tensor, bits: int, outputs: int, bias: Tensor | None) -> Tensor:
    """See reference.linear; data: packed. Products of float32 are exact unless use_tf32(True) was called."""
    x = x.contiguous()
    rows, inputs = x.shape
    if data.shape != data_shape(outputs, inputs, bits):
        raise ValueError(f"x is {tuple(x.shape)} for {tuple(data.shape)} of {bits} bits and {outputs} outputs")
    y = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    splits, steps = _splits(outputs, data.shape[1])
    is_apart = splits > 1 and rows <= APART
    sums = torch.empty(splits, rows, outputs, dtype=torch.float32, device=x.device) if is_apart else y
    config = _config(x, bits, outputs)
    tiles = (-(-outputs // config.blocks["BLOCK_OUT"]), -(-rows // config.blocks["BLOCK_ROWS"]))
    launch(
        _project,
        (*tiles, splits if is_apart else 1),
        *(x, data, None if is_apart else bias, sums, rows),
        config=config,
        OUTPUTS=outputs,
        INPUTS=inputs,
        STEPS=data.shape[1],
        SPLIT_STEPS=steps,
        SPLITS=1 if is_apart else splits,
        BITS=bits,
        PRECISION=dot_precision(),
    )
    if is_apart:
        launch(
            _add_splits,
            (-(-outputs // ADDED), rows),
            *(sums, bias, y, rows),
            config=KernelConfig(),
            OUTPUTS=outputs,
            SPLITS=splits,
            BLOCK_OUT=ADDED,
        )
    return y


def look_up(tokens: Tensor, data: Tensor, bits: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """See reference.look_up; data: packed from `shape`. A token outside of it gets NaN, for the host reads nothing."""
    outputs, inputs = shape
    found = torch.empty(len(tokens), inputs, dtype=dtype, device=data.device)
    launch(
        _look_up,
        (len(tokens), data.shape[1]),
        *(tokens.contiguous(), data, found),
        config=KernelConfig(warps=1),
        OUTPUTS=outputs,
        INPUTS=inputs,
        STEPS=data.shape[1],
        BITS=bits,
    )
    return found


def data_shape(outputs: int, inputs: int, bits: int) -> tuple[int, int, int]:
    """Of a weight that is packed."""
    return -(-outputs // BLOCK.value), -(-inputs // STEP.value), BLOCK.value * (4 + STEP.value * bits // 8)


def candidates(rows: int, dtype: torch.dtype) -> list[KernelConfig]:
    """Of _project. Always 64 outputs and 4 warps at least: with fewer, Hopper's tensor cores add in another way."""
    of_rows = _most_rows(rows, dtype)
    if dtype == torch.float32:
        return [_sized(64, of_rows, warps, stages) for warps in (4, 8) for stages in (2, 3, 4)]
    if rows > APART:
        sizes = [(64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3), (64, 128, 8, 2), (128, 128, 8, 2)]
        return [_sized(*size) for size in sizes]
    pairs = [(64, 4), (128, 4), (128, 8)]
    return [_sized(of_outputs, of_rows, warps, stages) for of_outputs, warps in pairs for stages in (2, 3, 4)]


def _config(x: Tensor, bits: int, outputs: int) -> KernelConfig:
    rows, inputs = x.shape
    of_rows = _most_rows(rows, x.dtype)
    if x.dtype == torch.float32:
        default = _sized(64, 16, 4, 3) if of_rows == 16 else _sized(64, of_rows, 8, 3)
    else:
        default = _sized(128, 64, 8, 3) if rows > APART else _sized(64, of_rows, 4, 4 if of_rows == 16 else 3)
    shape = f"rows={of_rows} outputs={outputs} inputs={inputs} bits={bits} {x.dtype}"
    return config_of("linear.quantized.linear", shape, x.device, default, *candidates(rows, x.dtype))


def _most_rows(rows: int, dtype: torch.dtype) -> int:
    """Of those that are computed by the same compiled kernel; as many as a tile has, up to APART."""
    sizes = (16,) if dtype == torch.float32 else (16, 32, APART)
    return next((most for most in sizes if rows <= most), 32 if dtype == torch.float32 else 2 * APART)


def _sized(of_outputs: int, of_rows: int, warps: int, stages: int) -> KernelConfig:
    """STAGES: given to the kernel too, for only loops that name it themselves fetch what is not multiplied ahead."""
    return KernelConfig({"BLOCK_OUT": of_outputs, "BLOCK_ROWS": of_rows, "STAGES": stages}, warps, stages)


def _splits(outputs: int, steps: int) -> tuple[int, int]:
    """How many sums an output is made of, and of how many steps each."""
    wanted = max(1, min(SPLIT_OUTPUTS // outputs, steps // LEAST_STEPS))
    in_each = -(-steps // wanted)
    return -(-steps // in_each), in_each


@jit
def _project(
    x_ptr,
    data_ptr,
    bias_ptr,
    y_ptr,
    rows,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    STEPS: tl.constexpr,
    SPLIT_STEPS: tl.constexpr,
    SPLITS: tl.constexpr,
    BITS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A tile of y, of all SPLITS from the program's own on. Programs: tiles of outputs, tiles of rows, splits."""
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
    places = (tl.program_id(2) * rows + at).to(tl.int64)[None, :] * OUTPUTS + outs[:, None]
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
    """float32 [outs, rows] of the packed weight at data_ptr, along the steps from begin to end.

    inside: which of `outs` there are; rows_ptr: where each row's inputs begin; here: which of the rows there are.
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
    SPLITS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """Programs: tiles of outputs, rows. In the order of _project."""
    outs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    inside = outs < OUTPUTS
    row = tl.program_id(1).to(tl.int64)
    total = tl.zeros((BLOCK_OUT,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(sums_ptr + (split * rows + row) * OUTPUTS + outs, inside, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + outs, inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * OUTPUTS + outs, total.to(y_ptr.dtype.element_ty), inside)


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
    """Programs: tokens, steps of inputs."""
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
    """[outputs, 2·words]: 1/64 of the integers at a place of each half of 32 bits, exactly.

    The eight lowest bits of a bfloat16, the others being 0, count multiples of 2^-133: numbers are made two at a time.
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
    """64 times one of the two bfloat16 that lie in 32 bits."""
    return (pair & -0x10000 if WHICH else pair << 16).to(tl.float32, bitcast=True) * 64.0
