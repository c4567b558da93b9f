"""The operation of reference.py in C++ (cpu.cpp), over packed weights. The results are batch-invariant."""

import torch
from torch import Tensor
from torch.nn import functional as F

from baton.kernels.linear.dense.native import checked_out
from baton.kernels.linear.quantized import reference
from baton.kernels.linear.quantized.reference import GROUP
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


def group_bytes(bits: int) -> int:
    """Return the bytes of one group of inputs for BLOCK outputs: bfloat16 scales, then codes."""
    return BLOCK * 2 + BLOCK * GROUP * bits // 8


def packed(codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Pack the results of reference.quantize as cpu.cpp reads them.

    Return uint8 [ceil(outputs/BLOCK), groups, group_bytes], padded with zeros. Each entry holds BLOCK scales, then
    codes:
    - 8 bits: [GROUP/2, BLOCK, 2] (pair of inputs, output, input of the pair).
    - 4 bits, with 8 added so that they are unsigned: bytes [GROUP/4, BLOCK/2, 2, 2] (four inputs, output o, input of a
      pair, pair). The lower half of a byte is the code of output o, the upper half is the code of output o + BLOCK/2.
    """
    outputs, groups = scales.shape
    blocks = -(-outputs // BLOCK)
    padded = F.pad(codes, (0, 0, 0, blocks * BLOCK - outputs)).view(blocks, BLOCK, groups, GROUP).transpose(1, 2)
    if bits == 8:
        interleaved = padded.reshape(blocks, groups, BLOCK, GROUP // 2, 2).transpose(2, 3)
    else:
        parts = padded.reshape(blocks, groups, 2, BLOCK // 2, GROUP // 4, 2, 2).permute(0, 1, 4, 3, 6, 5, 2)
        lower, upper = (parts + 8).unbind(6)
        interleaved = lower | upper << 4
    block_scales = F.pad(scales, (0, 0, 0, blocks * BLOCK - outputs)).view(blocks, BLOCK, groups).transpose(1, 2)
    both = (block_scales.contiguous().view(torch.uint8), interleaved.reshape(blocks, groups, -1).view(torch.uint8))
    return torch.cat(both, dim=2)


def linear(x: Tensor, data: Tensor, bits: int, outputs: int, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Compute reference.linear with packed data, in `out` if it is given.

    Raise ValueError for other dtypes and layouts.
    """
    run = cpp.function(LINEAR)
    assert run is not None
    rows, inputs = x.shape
    if x.dtype not in TYPES or data.shape != _shape(outputs, inputs, bits):
        raise ValueError(f"x is {tuple(x.shape)} of {x.dtype} for {tuple(data.shape)} of {bits} bits")
    if bias is not None and (bias.dtype != x.dtype or bias.shape != (outputs,) or not bias.is_contiguous()):
        raise ValueError(f"bias is {tuple(bias.shape)} of {bias.dtype} for {outputs} outputs in {x.dtype}")
    if x.stride(1) != 1:
        x = x.contiguous()
    y = torch.empty(rows, outputs, dtype=x.dtype) if out is None else checked_out(out, x, outputs)
    at = None if bias is None else bias.data_ptr()
    sizes = (rows, inputs, outputs)
    run(TYPES[x.dtype], bits, x.data_ptr(), x.stride(0), data.data_ptr(), at, y.data_ptr(), y.stride(0), *sizes)
    return y


def look_up(tokens: Tensor, data: Tensor, bits: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Compute reference.look_up in packed data. Raise IndexError for a token outside of the table.

    shape: the weight's shape before it was packed, [outputs, inputs].
    """
    run = cpp.function(LOOK_UP)
    assert run is not None
    outputs, inputs = shape
    tokens = tokens.contiguous()
    low, high = (int(bound) for bound in tokens.aminmax()) if len(tokens) else (0, 0)
    if low < 0 or high >= outputs:
        raise IndexError(f"a token is not in a table of {outputs}")
    rows = torch.empty(len(tokens), inputs, dtype=dtype)
    run(TYPES[dtype], bits, data.data_ptr(), tokens.data_ptr(), rows.data_ptr(), len(tokens), inputs)
    return rows


def _shape(outputs: int, inputs: int, bits: int) -> tuple[int, int, int]:
    """Return the shape of packed data."""
    return -(-outputs // BLOCK), -(-inputs // GROUP), group_bytes(bits)


def check_linear() -> None:
    """Raise AssertionError if the C function differs from the reference."""
    generator = torch.Generator().manual_seed(0)
    for bits in (8, 4):
        codes, scales = reference.quantize(torch.randn(45, 151, generator=generator), bits)
        data = packed(codes, scales, bits)
        for dtype in TYPES:
            bias = torch.randn(45, generator=generator).to(dtype)
            for rows in (1, 3, 29):
                x = torch.randn(rows, 151, generator=generator).to(dtype)
                found, expected = linear(x, data, bits, 45, bias), reference.linear(x, codes, scales, bias)
                tolerance = 1e-4 if dtype == torch.float32 else 0.05
                assert_agrees(found, expected, rtol=tolerance, atol=tolerance)


def check_look_up() -> None:
    """Raise AssertionError if the C function differs from the reference."""
    tokens = torch.arange(45)
    for bits in (8, 4):
        codes, scales = reference.quantize(torch.randn(45, 151, generator=torch.Generator().manual_seed(0)), bits)
        for dtype in TYPES:
            found = look_up(tokens, packed(codes, scales, bits), bits, (45, 151), dtype)
            assert torch.equal(found, reference.look_up(tokens, codes, scales, 151, dtype))


cpp.declare(LINEAR, [INT, INT, POINTER, INT64, POINTER, POINTER, POINTER, *(INT64,) * 4], check_linear)
cpp.declare(LOOK_UP, [INT, INT, POINTER, POINTER, POINTER, INT64, INT64], check_look_up)
