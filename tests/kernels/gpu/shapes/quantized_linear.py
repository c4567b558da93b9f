"""Projections with integer weights, and embedding look-up in them."""

from collections.abc import Callable
from functools import partial

import torch

from baton.kernels.linear.quantized import triton

SHAPES = {
    "mamba2-130m in": (3352, 768),
    "mamba2-130m head": (50288, 768),
    "mamba2-2.7b out": (2560, 5120),
    "codestral-7b in": (18560, 4096),
    "nemotron-h-8b down": (4096, 21504),
    "nemotron-h-8b keys": (1024, 4096),
    "odd": (70, 1130),
}


def project(shape: tuple[int, int], bits: int, rows: int, dtype: torch.dtype) -> None:
    outputs, inputs = shape
    x = torch.empty(rows, inputs, dtype=dtype, device="meta")
    bias = torch.empty(outputs, dtype=dtype, device="meta") if outputs == 70 else None
    data = torch.empty(triton.data_shape(outputs, inputs, bits), dtype=torch.uint8, device="meta")
    triton.linear(x, data, bits, outputs, bias)


def look_up(shape: tuple[int, int], bits: int, dtype: torch.dtype) -> None:
    data = torch.empty(triton.data_shape(*shape, bits), dtype=torch.uint8, device="meta")
    triton.look_up(torch.empty(5, dtype=torch.int64, device="meta"), data, bits, shape, dtype)


F32, BF16 = torch.float32, torch.bfloat16
CASES: list[tuple[str, Callable[[], None]]] = [
    *(
        (f"{name} int{bits} {rows} rows {dtype}", partial(project, shape, bits, rows, dtype))
        for name, shape in SHAPES.items()
        for bits in (8, 4)
        for rows, dtype in [(1, BF16), (32, BF16), (64, BF16), (512, BF16), (1, F32), (512, F32)]
    ),
    *(
        (f"{name} int{bits} rows of it {dtype}", partial(look_up, SHAPES[name], bits, dtype))
        for name in ("mamba2-130m head", "odd")
        for bits in (8, 4)
        for dtype in (BF16, F32)
    ),
]
