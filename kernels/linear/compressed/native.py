"""The operation of reference.py in C++ (cpu.cpp). The results have the bits of linear.dense."""

from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from baton.kernels.linear.compressed import reference
from baton.kernels.linear.compressed.reference import BLOCK, TABLE, UNIT, UNIT_BYTES, WHOLE_BYTES, aligned
from baton.kernels.linear.dense.native import checked_out, checked_tokens
from baton.kernels.runtime import cpp, memory
from baton.kernels.runtime.cpp import INT64, POINTER
from baton.kernels.runtime.cpp.checks import assert_agrees

LINEAR = "baton_compressed_linear"
LOOK_UP = "baton_compressed_look_up"
COMPRESS = "baton_compress"
PAYS = "baton_compression_pays"
MOST_WHOLE = 0.05
"""Maximum share of units that are kept whole. With more of them, the weight is hardly smaller, and products
switch between the two formats too often."""


def takes(weight: Tensor) -> bool:
    """Return whether the C functions are installed, take this weight, and are faster than linear.dense here."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return False
    return all(cpp.function(name) for name in (LINEAR, LOOK_UP, COMPRESS)) and pays()


def pays() -> bool:
    """Return whether products are faster with compressed weights on the target of the installed library."""
    run, answer = cpp.function(PAYS), torch.zeros(1, dtype=torch.int64)
    if run is not None:
        run(answer.data_ptr())
    return bool(answer)


def compressed(weight: Tensor) -> Tensor | None:
    """Compress a weight [outputs, inputs] as reference.py says: uint8 [bytes].

    Return None if too many of its units would be kept whole.
    """
    run = cpp.function(COMPRESS)
    assert run is not None
    weight = weight.detach()
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    (outputs, inputs), stride = weight.shape, weight.stride(0)
    whole = torch.empty(-(-outputs // BLOCK), dtype=torch.int64)
    run(weight.data_ptr(), stride, whole.data_ptr(), None, inputs, outputs)
    units = -(-inputs // UNIT)
    if int(whole.sum()) > MOST_WHOLE * units * len(whole):
        return None
    sizes = [aligned(TABLE + 4 + 4 * n) + units * UNIT_BYTES + n * (WHOLE_BYTES - UNIT_BYTES) for n in whole.tolist()]
    offsets = torch.tensor([*accumulate(sizes, initial=aligned(8 * (len(sizes) + 1)))])
    data = memory.empty(int(offsets[-1]), dtype=torch.uint8)
    data[: offsets[0]] = F.pad(offsets.view(torch.uint8), (0, int(offsets[0]) - offsets.nbytes))
    run(weight.data_ptr(), stride, None, data.data_ptr(), inputs, outputs)
    return data


def linear(x: Tensor, data: Tensor, shape: tuple[int, int], bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Compute reference.linear, in `out` if it is given. Raise ValueError for other dtypes and shapes.

    shape: the weight's, [outputs, inputs].
    """
    run = cpp.function(LINEAR)
    assert run is not None
    rows, (outputs, inputs) = len(x), shape
    if x.dtype != torch.bfloat16 or x.shape[1] != inputs:
        raise ValueError(f"x is {tuple(x.shape)} of {x.dtype} for {inputs} inputs in torch.bfloat16")
    if bias is not None and (bias.dtype != x.dtype or bias.shape != (outputs,) or not bias.is_contiguous()):
        raise ValueError(f"bias is {tuple(bias.shape)} of {bias.dtype} for {outputs} outputs in torch.bfloat16")
    if x.stride(1) != 1:
        x = x.contiguous()
    y = torch.empty(rows, outputs, dtype=x.dtype) if out is None else checked_out(out, x, outputs)
    at = None if bias is None else bias.data_ptr()
    run(x.data_ptr(), x.stride(0), data.data_ptr(), at, y.data_ptr(), y.stride(0), rows, inputs, outputs)
    return y


def look_up(tokens: Tensor, data: Tensor, shape: tuple[int, int]) -> Tensor:
    """Compute reference.look_up. Raise IndexError for a token outside of the weight. shape: as for `linear`."""
    run = cpp.function(LOOK_UP)
    assert run is not None
    outputs, inputs = shape
    tokens = checked_tokens(tokens, outputs)
    rows = torch.empty(len(tokens), inputs, dtype=torch.bfloat16)
    run(data.data_ptr(), tokens.data_ptr(), rows.data_ptr(), len(tokens), inputs)
    return rows


def check_compress() -> None:
    """Raise AssertionError if compressed data differs from its definition."""
    weight, data = _example()
    assert torch.equal(reference.plain(data, (45, 203)), weight), "the weight is not in the data"


def check_linear() -> None:
    """Raise AssertionError if the C function differs from the reference."""
    weight, data = _example()
    one, generator = torch.eye(203, dtype=torch.bfloat16), torch.Generator().manual_seed(0)
    for rows in (1, 5, 29):
        for some in torch.split(one, rows):  # Each product is one weight, exactly.
            assert torch.equal(linear(some, data, (45, 203), None), some @ weight.t()), "a weight is wrong"
        x, bias = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((rows, 203), (45,)))
        found, expected = linear(x, data, (45, 203), bias), reference.linear(x, data, (45, 203), bias)
        assert_agrees(found, expected, rtol=0.05, atol=0.05)


def check_look_up() -> None:
    """Raise AssertionError if the C function differs from the reference."""
    weight, data = _example()
    assert torch.equal(look_up(torch.arange(45), data, (45, 203)), weight)


def check_pays() -> None:
    """Raise nothing: there is no wrong answer."""


def _example() -> tuple[Tensor, Tensor]:
    """Return a weight [45, 203] with three upper bytes that are not in its tables, and its compressed data."""
    weight = torch.randn(45, 203, generator=torch.Generator().manual_seed(0))
    weight = torch.where(weight.abs() < 0.01, 0.01, weight)
    weight[[0, 31, 7], [0, 4, 199]] = torch.tensor([1e-30, -1e30, 2e-38])
    data = compressed(weight.bfloat16())
    assert data is not None, "the weight is not compressed"
    return weight.bfloat16(), data


cpp.declare(COMPRESS, [POINTER, INT64, POINTER, POINTER, INT64, INT64], check_compress)
cpp.declare(LINEAR, [POINTER, INT64, POINTER, POINTER, POINTER, *(INT64,) * 4], check_linear)
cpp.declare(LOOK_UP, [POINTER, POINTER, POINTER, INT64, INT64], check_look_up)
cpp.declare(PAYS, [POINTER], check_pays)
