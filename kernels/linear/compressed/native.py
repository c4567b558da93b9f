"""The operation of reference.py in C++ (cpu.cpp). The results have the bits of linear.dense."""

import torch
from torch import Tensor

from baton.kernels.linear.dense.native import checked_out
from baton.kernels.runtime import cpp
from baton.kernels.runtime.cpp import INT64, POINTER

LINEAR = "baton_compressed_linear"
LOOK_UP = "baton_compressed_look_up"
COUNT_WHOLE = "baton_count_whole"
COMPRESS = "baton_compress"
BLOCK, UNIT, UNIT_BYTES, WHOLE_BYTES, LINE = 32, 4, 192, 256, 64


def compressed(weight: Tensor) -> Tensor | None:
    outputs, inputs = weight.shape
    blocks, units = -(-outputs // BLOCK), -(-inputs // UNIT)
    count, write = cpp.function(COUNT_WHOLE), cpp.function(COMPRESS)
    assert count is not None and write is not None
    whole = torch.empty(blocks, dtype=torch.int64)
    count(weight.data_ptr(), weight.stride(0), whole.data_ptr(), inputs, outputs)
    if int(whole.sum()) > blocks * units / 20:
        return None
    heads = (20 + 4 * whole + LINE - 1) // LINE * LINE
    sizes = heads + units * UNIT_BYTES + whole * (WHOLE_BYTES - UNIT_BYTES)
    begin = ((blocks + 1) * 8 + LINE - 1) // LINE * LINE
    offsets = begin + torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    data = torch.empty(int(offsets[-1]), dtype=torch.uint8)
    data[: offsets.nbytes] = offsets.view(torch.uint8)
    write(weight.data_ptr(), weight.stride(0), data.data_ptr(), inputs, outputs)
    return data


def takes(weight: Tensor) -> bool:
    return all(cpp.function(name) is not None for name in (LINEAR, LOOK_UP, COUNT_WHOLE, COMPRESS))


def linear(x: Tensor, data: Tensor, outputs: int, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    run = cpp.function(LINEAR)
    assert run is not None
    rows, inputs = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    y = torch.empty(rows, outputs, dtype=x.dtype) if out is None else checked_out(out, x, outputs)
    at = None if bias is None else bias.data_ptr()
    run(x.data_ptr(), x.stride(0), data.data_ptr(), at, y.data_ptr(), y.stride(0), rows, inputs, outputs)
    return y


def look_up(tokens: Tensor, data: Tensor, shape: tuple[int, int]) -> Tensor:
    run = cpp.function(LOOK_UP)
    assert run is not None
    outputs, inputs = shape
    tokens = tokens.contiguous()
    rows = torch.empty(len(tokens), inputs, dtype=torch.bfloat16)
    run(data.data_ptr(), tokens.data_ptr(), rows.data_ptr(), len(tokens), inputs)
    return rows


def check() -> None:
    pass


cpp.declare(LINEAR, [POINTER, INT64, POINTER, POINTER, POINTER, *(INT64,) * 4], check)
cpp.declare(LOOK_UP, [POINTER, POINTER, POINTER, INT64, INT64], check)
cpp.declare(COUNT_WHOLE, [POINTER, INT64, POINTER, INT64, INT64], check)
cpp.declare(COMPRESS, [POINTER, INT64, POINTER, INT64, INT64], check)
