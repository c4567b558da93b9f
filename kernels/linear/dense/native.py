"""The operation of reference.py in C++ (cpu.cpp), over packed weights. The results are batch-invariant."""

import torch
from torch import Tensor
from torch.nn import functional as F

from baton.kernels.linear.dense import reference
from baton.kernels.runtime import cpp, memory
from baton.kernels.runtime.cpp import INT, INT64, POINTER, TYPES
from baton.kernels.runtime.cpp.checks import assert_agrees

LINEAR = "baton_linear"
LOOK_UP = "baton_look_up"
BLOCK = 32
INPUTS = {torch.float32: 1, torch.bfloat16: 2}
"""How many consecutive inputs of one output are adjacent in memory: as many as one multiply-add instruction takes."""


def takes(weight: Tensor) -> bool:
    """Return whether the C functions are installed and take weights of this device and dtype."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in TYPES
        and cpp.function(LINEAR) is not None
        and cpp.function(LOOK_UP) is not None
    )


def packed(weight: Tensor) -> Tensor:
    """Pack a weight [outputs, inputs] as [ceil(outputs/32), ceil(inputs/k), 32, k], padded with zeros.

    k: the number in INPUTS for the weight's dtype.
    """
    (outputs, inputs), side = weight.shape, INPUTS[weight.dtype]
    blocks, steps, whole = -(-outputs // BLOCK), -(-inputs // side), outputs // BLOCK
    rows = weight.detach() if inputs % side == 0 else F.pad(weight.detach(), (0, steps * side - inputs))
    # Write into the result without another copy of the weight: an LM head may be a quarter of a model.
    result = memory.empty(blocks, steps, BLOCK, side, dtype=rows.dtype)
    result[:whole] = rows[: whole * BLOCK].view(whole, BLOCK, steps, side).transpose(1, 2)
    if rest := outputs % BLOCK:
        result[whole, :, :rest] = rows[-rest:].view(rest, steps, side).transpose(0, 1)
        result[whole, :, rest:] = 0
    return result


def linear(x: Tensor, weight: Tensor, outputs: int, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Compute reference.linear with a packed weight, in `out` if it is given.

    Raise ValueError for other dtypes and layouts.
    """
    run = cpp.function(LINEAR)
    assert run is not None
    rows, inputs = x.shape
    if x.dtype != weight.dtype or weight.shape != _shape(outputs, inputs, x.dtype):
        raise ValueError(f"x is {tuple(x.shape)} of {x.dtype} for {tuple(weight.shape)} of {weight.dtype}")
    if bias is not None and (bias.dtype != weight.dtype or bias.shape != (outputs,) or not bias.is_contiguous()):
        raise ValueError(f"bias is {tuple(bias.shape)} of {bias.dtype} for {outputs} outputs in {weight.dtype}")
    if x.stride(1) != 1:
        x = x.contiguous()
    y = torch.empty(rows, outputs, dtype=x.dtype) if out is None else checked_out(out, x, outputs)
    at = None if bias is None else bias.data_ptr()
    run(
        TYPES[x.dtype],
        x.data_ptr(),
        x.stride(0),
        weight.data_ptr(),
        at,
        y.data_ptr(),
        y.stride(0),
        rows,
        inputs,
        outputs,
    )
    return y


def checked_out(out: Tensor, x: Tensor, outputs: int) -> Tensor:
    """Return `out`. Raise ValueError unless the C functions can write a result for x into it, row by row."""
    if out.shape != (len(x), outputs) or out.dtype != x.dtype or out.stride(1) != 1 or not out.is_cpu:
        raise ValueError(f"out is {tuple(out.shape)} of {out.dtype} for {len(x)} rows of {outputs} in {x.dtype}")
    return out


def checked_tokens(tokens: Tensor, outputs: int) -> Tensor:
    """Return the tokens, contiguous. Raise IndexError for a token outside of a table with `outputs` rows."""
    low, high = (int(bound) for bound in tokens.aminmax()) if len(tokens) else (0, 0)
    if low < 0 or high >= outputs:
        raise IndexError(f"a token is not in a table of {outputs}")
    return tokens.contiguous()


def look_up(tokens: Tensor, weight: Tensor, shape: tuple[int, int]) -> Tensor:
    """Compute reference.look_up in a packed weight. Raise IndexError for a token outside of the weight.

    shape: the weight's shape before it was packed, [outputs, inputs].
    """
    run = cpp.function(LOOK_UP)
    assert run is not None
    outputs, inputs = shape
    tokens = checked_tokens(tokens, outputs)
    rows = torch.empty(len(tokens), inputs, dtype=weight.dtype)
    run(TYPES[weight.dtype], weight.data_ptr(), tokens.data_ptr(), rows.data_ptr(), len(tokens), inputs)
    return rows


def _shape(outputs: int, inputs: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Return the shape of a packed weight."""
    side = INPUTS[dtype]
    return -(-outputs // BLOCK), -(-inputs // side), BLOCK, side


def check_linear() -> None:
    """Raise AssertionError if the C function differs from the reference."""
    generator = torch.Generator().manual_seed(0)
    for dtype in TYPES:
        weight = torch.randn(45, 71, generator=generator).to(dtype)
        bias = torch.randn(45, generator=generator).to(dtype)
        for rows in (1, 3, 29):
            x = torch.randn(rows, 71, generator=generator).to(dtype)
            found, expected = linear(x, packed(weight), 45, bias), reference.linear(x, weight, bias)
            tolerance = 1e-4 if dtype == torch.float32 else 0.05
            assert_agrees(found, expected, rtol=tolerance, atol=tolerance)


def check_look_up() -> None:
    """Raise AssertionError if the C function differs from the reference."""
    for dtype in TYPES:
        weight = torch.randn(45, 71, generator=torch.Generator().manual_seed(0)).to(dtype)
        assert torch.equal(look_up(torch.arange(45), packed(weight), (45, 71)), weight)


cpp.declare(LINEAR, [INT, POINTER, INT64, POINTER, POINTER, POINTER, *(INT64,) * 4], check_linear)
cpp.declare(LOOK_UP, [INT, POINTER, POINTER, POINTER, INT64, INT64], check_look_up)
