"""Decode of Mamba-2 mixers: convolution, state update, gated norm."""

from collections.abc import Callable
from functools import partial

import torch

from baton.kernels.mamba2.decode import triton
from tests.kernels.gpu.shapes.mamba2 import SHAPES, MixerShape


def decode(shape: MixerShape, dtype: torch.dtype, states: torch.dtype) -> None:
    index = torch.empty(5, dtype=torch.int64, device="meta")
    triton.mixer_decode(shape.projected(5, dtype), shape.constants(), *shape.pools(9, states), index, index)


F32, BF16 = torch.float32, torch.bfloat16
CASES: list[tuple[str, Callable[[], None]]] = [
    (f"{name} {dtype} {states}", partial(decode, shape, dtype, states))
    for name, shape in SHAPES.items()
    for dtype, states in [(BF16, F32), (F32, F32), (BF16, BF16)]
]
