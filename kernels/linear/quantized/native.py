"""The operation of reference.py in C++ (cpu.cpp), over packed weights. The results are batch-invariant."""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from baton.kernels.linear.dense.native import checked_out, checked_tokens
from baton.kernels.linear.quantized.forms import INTEGERS, Form, Groups
from baton.kernels.runtime import cpp
from baton.kernels.runtime.cpp import INT, INT64, POINTER, TYPES
from baton.kernels.runtime.cpp.checks import assert_agrees

LINEAR = "baton_quantized_linear"
LOOK_UP = "baton_quantized_look_up"
BLOCK = 32


def takes(weight: Tensor) -> bool:
    """Return whether the C functions are installed and take this weight after it has been quantized."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in TYPES
        and cpp.function(LINEAR) is not None
        and cpp.function(LOOK_UP) is not None
    )


def packed(groups: Groups) -> Tensor:
    """Pack a weight as cpu.cpp reads it: uint8 [ceil(outputs/BLOCK), spans, bytes], padded with zeros.

    A span of a block has, in this order:
    - the shared scales [BLOCK];
    - if the form has minima: the shared minima [BLOCK];
    - if a span has several groups: the factors of their scales [span, BLOCK], then the factors of their minima;
    - for each group: its codes, as units and lines of upper bits, which codes.h describes.
    """
    form, blocks = groups.form, -(-groups.outputs // BLOCK)
    missing = blocks * BLOCK - groups.outputs

    def by_block(values: Tensor | None, of_span: int) -> list[Tensor]:
        """Return values [outputs, spans · of_span] as bytes [blocks, spans, ..], in a list; [] if `values` is None."""
        if values is None:
            return []
        padded = F.pad(values, (0, 0, 0, missing)).view(blocks, BLOCK, -1, of_span)
        return [padded.permute(0, 2, 3, 1).contiguous().view(torch.uint8).flatten(2)]

    shared = by_block(groups.scales, 1) + by_block(groups.minima, 1)
    factors = by_block(groups.factors, form.span) + by_block(groups.minimum_factors, form.span)
    codes = F.pad(groups.codes, (0, 0, 0, missing)).view(blocks, BLOCK, -1, form.group).transpose(1, 2)
    spans = packed_codes(codes, form).view(blocks, groups.scales.shape[1], -1)
    return torch.cat([*shared, *factors, spans], dim=2)


def packed_codes(codes: Tensor, form: Form) -> Tensor:
    """Pack codes, int8 [blocks, groups, BLOCK, form.group]: uint8 [blocks, groups, bytes]."""
    if form.bits == 8:
        return codes.contiguous().view(torch.int16).transpose(2, 3).contiguous().view(torch.uint8).flatten(2)
    first, second = (codes + form.zero).view(torch.uint8).chunk(2, 2)  # the halves of the outputs
    lower = (first & 15) | (second << 4)
    units = middle_swapped(lower.contiguous().view(torch.int32)).transpose(2, 3).contiguous().view(torch.uint8)
    if form.bits == 4:
        return units.flatten(2)
    upper = form.bits - 4
    # [blocks, groups, output of a half, unit, pair, input]: a unit's fields of each output and input are joined.
    both = ((first >> 4) | (second >> 4 << upper)).view(*first.shape[:3], -1, 2, 2)
    fields = both[..., 0, :] | both[..., 1, :] << 2 * upper
    if upper == 1:
        fields = fields[:, :, :, ::2] | fields[:, :, :, 1::2] << 4
    lines = fields.view(*first.shape[:3], -1, 2, 2).permute(0, 1, 3, 2, 5, 4)  # [.., line, output, input, byte]
    return torch.cat([units.flatten(2), lines.flatten(2)], dim=2)


def middle_swapped(words: Tensor) -> Tensor:
    """Return words of 32 bits with their second and third byte swapped, so that an input's bytes are adjacent."""
    return (words & -0xFFFF01) | ((words & 0xFF00) << 8) | ((words >> 8) & 0xFF00)


def linear(x: Tensor, data: Tensor, form: Form, outputs: int, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Return x @ weightᵀ + bias, as reference.linear does, in `out` if it is given. data: the packed weight.

    Raise ValueError for other dtypes and layouts.
    """
    return linear_with(LINEAR, x, data, form, outputs, bias, out)


def linear_with(
    name: str, x: Tensor, data: Tensor, form: Form, outputs: int, bias: Tensor | None, out: Tensor | None
) -> Tensor:
    """Return what the C function `name` computes, which takes what the one of `linear` takes."""
    run = cpp.function(name)
    assert run is not None
    rows, inputs = x.shape
    if x.dtype not in TYPES or data.shape != shape_of(outputs, inputs, form):
        kind = f"{form.bits} bits in groups of {form.group}"
        raise ValueError(f"x is {tuple(x.shape)} of {x.dtype} for {tuple(data.shape)} of {kind}")
    if bias is not None and (bias.dtype != x.dtype or bias.shape != (outputs,) or not bias.is_contiguous()):
        raise ValueError(f"bias is {tuple(bias.shape)} of {bias.dtype} for {outputs} outputs in {x.dtype}")
    if x.stride(1) != 1:
        x = x.contiguous()
    y = torch.empty(rows, outputs, dtype=x.dtype) if out is None else checked_out(out, x, outputs)
    at = None if bias is None else bias.data_ptr()
    sizes = (rows, inputs, outputs)
    run(TYPES[x.dtype], form.code, x.data_ptr(), x.stride(0), data.data_ptr(), at, y.data_ptr(), y.stride(0), *sizes)
    return y


def look_up(tokens: Tensor, data: Tensor, form: Form, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return rows of a packed weight, as reference.look_up does. Raise IndexError for a token outside of the table.

    shape: the weight's shape before it was packed, [outputs, inputs].
    """
    run = cpp.function(LOOK_UP)
    assert run is not None
    outputs, inputs = shape
    tokens = checked_tokens(tokens, outputs)
    rows = torch.empty(len(tokens), inputs, dtype=dtype)
    run(TYPES[dtype], form.code, data.data_ptr(), tokens.data_ptr(), rows.data_ptr(), len(tokens), inputs)
    return rows


def shape_of(outputs: int, inputs: int, form: Form) -> tuple[int, int, int]:
    """Return the shape of packed data."""
    return -(-outputs // BLOCK), -(-inputs // form.width), form.span_bytes(BLOCK)


def check_linear() -> None:
    """Raise AssertionError if the C function differs from the product with the numbers of the weight."""
    generator = torch.Generator().manual_seed(0)
    for form in CHECKED:
        inputs = 151 if form.span == 1 else form.width
        groups = random_groups(form, 45, inputs, generator)
        data, numbers = packed(groups), groups.numbers()[:, :inputs]
        for dtype in TYPES:
            bias = torch.randn(45, generator=generator).to(dtype)
            for rows in (1, 3, 29):
                x = torch.randn(rows, inputs, generator=generator).to(dtype)
                found, expected = linear(x, data, form, 45, bias), x.float() @ numbers.t() + bias.float()
                tolerance = 1e-4 if dtype == torch.float32 else 0.05
                assert_agrees(found, expected.to(dtype), rtol=tolerance, atol=tolerance)


def check_look_up() -> None:
    """Raise AssertionError if the C function differs from the numbers of the weight."""
    tokens, generator = torch.arange(45), torch.Generator().manual_seed(0)
    for form in CHECKED:
        groups = random_groups(form, 45, form.width, generator)
        for dtype in TYPES:
            found = look_up(tokens, packed(groups), form, (45, form.width), dtype)
            # A minimum may be subtracted without rounding the product before.
            assert_agrees(found, groups.numbers().to(dtype), rtol=0.01 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


CHECKED = (
    *INTEGERS.values(),
    Form(8, 32, dtype=torch.float16),
    Form(4, 32, span=8, has_minima=True, dtype=torch.float16),
    Form(4, 64, span=2, has_minima=True, dtype=torch.float16),
    Form(5, 32, has_minima=True, dtype=torch.float16),
    Form(6, 16, span=16, dtype=torch.float16),
)


def random_groups(form: Form, outputs: int, inputs: int, generator: torch.Generator) -> Groups:
    """Return random weights in a form, of about the size of 1. Weights beyond `inputs` are 0 if there are no minima."""
    spans = -(-inputs // form.width)
    low = 0 if form.has_minima else -form.zero

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator).to(torch.int8)

    def shared(size: float) -> Tensor:
        return (torch.randn(outputs, spans, generator=generator) * size).to(form.dtype)

    factors = partial(integers, 1, 64, outputs, spans * form.span)
    codes = integers(low, low + 2**form.bits, outputs, spans * form.width)
    codes[:, inputs:] = 0
    size = 2.0 ** (1 - form.bits) / (32 if form.span > 1 else 1)
    return Groups(
        form,
        codes,
        shared(size),
        factors() if form.span > 1 else None,
        shared(size * 2 ** (form.bits - 1)) if form.has_minima else None,
        factors() if form.span > 1 and form.has_minima else None,
    )


ARGUMENTS = [INT, INT, POINTER, INT64, POINTER, POINTER, POINTER, *(INT64,) * 4]
"""Types of the arguments of LINEAR."""

cpp.declare(LINEAR, ARGUMENTS, check_linear)
cpp.declare(LOOK_UP, [INT, INT, POINTER, POINTER, POINTER, INT64, INT64], check_look_up)
