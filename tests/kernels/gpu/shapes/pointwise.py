"""Operations between projections, at the shapes of models."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import baton.kernels.activations.triton
import baton.kernels.attention.paged.triton_write
import baton.kernels.attention.rotary.triton
import baton.kernels.attention.rotate_and_write.triton


def write(heads: int, kv_heads: int, width: int, turned: int, dtype: torch.dtype) -> None:
    """Write keys and values, with rotation of `turned` columns and without. All inputs are slices of a projection."""
    projected = torch.empty(3, heads + 2 * kv_heads, width, dtype=dtype, device="meta")
    query, keys, values = projected.split([heads, kv_heads, kv_heads], 1)
    pages = torch.empty(64, 4, 2, 16, kv_heads, width, dtype=dtype, device="meta")[:, 1].unbind(1)
    cos = sin = torch.empty(3, 1, turned, device="meta")
    places = torch.empty(3, dtype=torch.int64, device="meta")
    baton.kernels.attention.rotate_and_write.triton.rotate_and_write(query, keys, values, cos, sin, *pages, places)
    baton.kernels.attention.paged.triton_write.write_pages(keys, values, *pages, places)
    baton.kernels.attention.rotary.triton.rotate(query, cos, sin)


def activate(run: Callable[[Tensor], Tensor], width: int, dtype: torch.dtype) -> None:
    run(torch.empty(3, width, dtype=dtype, device="meta"))


def gate(width: int, gates: int, dtype: torch.dtype) -> None:
    x, opened = (torch.empty(3, count, dtype=dtype, device="meta") for count in (width, gates))
    baton.kernels.activations.triton.sigmoid_gate(x, opened)


def turn_last(heads: int, width: int, turned: int, dtype: torch.dtype) -> None:
    """Rotate the last `turned` columns, as of queries and keys of latent attention."""
    x, cos = torch.empty(3, heads, width, dtype=dtype, device="meta"), torch.empty(3, 1, turned, device="meta")
    baton.kernels.attention.rotary.triton.rotate(x, cos, cos, width - turned)


TYPES = (torch.bfloat16, torch.float32)
MODELS = {
    "Nemotron-H 8B": (32, 8, 128, 128),
    "Granite 4 h-tiny": (12, 4, 128, 128),
    "Bamba 9B": (32, 8, 128, 64),
    "Qwen3-Next": (16, 2, 256, 64),
    "odd": (10, 2, 96, 96),
    "odd in part": (10, 3, 90, 22),
    "large": (128, 8, 128, 128),
}
CASES: list[tuple[str, Callable[[], None]]] = [
    *(
        (f"rotary and pages, {name}, {dtype}", partial(write, *shape, dtype))
        for name, shape in MODELS.items()
        for dtype in TYPES
    ),
    *(
        (f"{run.__name__} of {width}, {dtype}", partial(activate, run, width, dtype))
        for run in (baton.kernels.activations.triton.silu_multiply, baton.kernels.activations.triton.squared_relu)
        for width in (21504, 3072, 1000)
        for dtype in TYPES
    ),
    *(
        (f"{gates} gates of {width}, {dtype}", partial(gate, width, gates, dtype))
        for width, gates in ((4096, 4096), (4096, 32), (2048, 16), (1000, 1000))
        for dtype in TYPES
    ),
    *(
        (f"rotary of the last columns, {heads} of {width}, {dtype}", partial(turn_last, heads, width, 64, dtype))
        for heads, width in ((32, 192), (1, 576))
        for dtype in TYPES
    ),
]
