"""Decode of Mamba-2 mixers, with drafts and without: convolution, state update, gated norm."""

from collections.abc import Callable
from functools import partial

import torch

from baton.kernels.mamba2.decode import triton
from tests.kernels.gpu.shapes.mamba2 import SHAPES, MixerShape, drafts_of


def decode(shape: MixerShape, dtype: torch.dtype, states: torch.dtype) -> None:
    index = torch.empty(5, dtype=torch.int64, device="meta")
    triton.mixer_decode(shape.projected(5, dtype), shape.constants(), *shape.pools(9, states), index, index)


def decode_drafts(shape: MixerShape, dtype: torch.dtype, states: torch.dtype) -> None:
    index, drafts = torch.empty(5, dtype=torch.int64, device="meta"), drafts_of(5)
    ring = torch.empty(6, 8, shape.channels + shape.heads, dtype=dtype, device="meta")
    pools = shape.pools(9, states)
    triton.mixer_decode_drafts(shape.projected(13, dtype), shape.constants(), *pools, index, index, drafts, ring)


F32, BF16 = torch.float32, torch.bfloat16
CASES: list[tuple[str, Callable[[], None]]] = [
    (f"{run.__name__} {name} {dtype} {states}", partial(run, shape, dtype, states))
    for run in (decode, decode_drafts)
    for name, shape in SHAPES.items()
    for dtype, states in [(BF16, F32), (F32, F32), (BF16, BF16)]
]
