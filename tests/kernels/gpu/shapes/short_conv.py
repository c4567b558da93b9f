"""Gated short convolutions of real and odd shapes: prefill, and decode with drafts and without."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from baton.kernels.prefill.plan import plan_prefill
from baton.kernels.short_conv import triton
from baton.kernels.short_conv.constants import ShortConvConstants
from tests.kernels.gpu.shapes.mamba2 import drafts_of

SHAPES = {
    "lfm2-350m": (1024, 3, False),
    "lfm2-1.2b": (2048, 3, False),
    "lfm3-1.7b": (2048, 7, False),
    "odd": (300, 5, True),
}
"""Channels, width, and whether there is a bias."""
Shape = tuple[int, int, bool]


def prefill(shape: Shape, dtype: torch.dtype) -> None:
    plan = plan_prefill([0, 200, 201], [64, 0], [2, 0], [(0, 100, 1)], 64, shape[1], torch.device("meta"))
    triton.short_conv_prefill(*layer(shape, plan.tokens, dtype), plan)


def decode(shape: Shape, dtype: torch.dtype) -> None:
    index = torch.empty(5, dtype=torch.int64, device="meta")
    triton.short_conv_decode(*layer(shape, 5, dtype), index, index)


def decode_drafts(shape: Shape, dtype: torch.dtype) -> None:
    index, ring = torch.empty(5, dtype=torch.int64, device="meta"), _meta(6, 8, shape[0]).to(dtype)
    triton.short_conv_decode_drafts(*layer(shape, 13, dtype), index, index, drafts_of(5), ring)


def layer(shape: Shape, tokens: int, dtype: torch.dtype) -> tuple[Tensor, ShortConvConstants, Tensor]:
    """Return the inputs of `tokens` tokens, constants, and a pool whose slots hold two layers."""
    channels, kernel, has_bias = shape
    constants = ShortConvConstants(_meta(kernel, channels), _meta(channels) if has_bias else None)
    return _meta(tokens, 3 * channels).to(dtype), constants, _meta(9, 2, kernel - 1, channels)[:, 1]


def _meta(*shape: int) -> Tensor:
    return torch.empty(*shape, device="meta")


CASES: list[tuple[str, Callable[[], None]]] = [
    (f"{run.__name__} {name} {dtype}", partial(run, shape, dtype))
    for run in (prefill, decode, decode_drafts)
    for name, shape in SHAPES.items()
    for dtype in (torch.bfloat16, torch.float32)
]
