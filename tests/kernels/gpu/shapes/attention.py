"""Paged attention at the shapes of models."""

from collections.abc import Callable
from functools import partial

import torch

from baton.kernels.attention.paged import triton


def attend(
    heads: int,
    kv_heads: int,
    width: int,
    dtype: torch.dtype,
    page: int = 16,
    rank: int | None = None,
    window: int = 0,
) -> None:
    """Attend with two prompts and three decoding rows. The query is a slice of a projection, pages are strided.

    rank: width of the values if they are the first columns of the keys, as with latents; None: they are separate.
    """

    def empty(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=of, device="meta")

    projected = empty(203, (heads + 2 * kv_heads) * width)
    query = projected[:, : heads * width].unflatten(1, (heads, width))
    pages = empty(64, 4, 2, page, kv_heads, width)
    keys, values = pages[:, 1].unbind(1)
    values = values if rank is None else keys[..., :rank]
    layout = empty(5, 64, of=torch.int32), empty(6, of=torch.int64), empty(5, of=torch.int64)
    triton.paged_attention(query, keys, values, *layout, 0.1, 2, 100, window)


MODELS = {
    "Nemotron-H 8B": (32, 8, 128),
    "Nemotron 3 Nano": (32, 2, 128),
    "Granite 4 h-small": (32, 8, 128),
    "Granite 4 h-tiny": (12, 4, 128),
    "heads of 64": (32, 8, 64),
    "heads of 256": (16, 2, 256),
    "no heads share keys": (32, 32, 80),
    "all heads share keys": (48, 1, 128),
    "odd": (10, 2, 96),
}
DTYPES = (torch.bfloat16, torch.float32)
CASES: list[tuple[str, Callable[[], None]]] = [
    *(
        (f"attention, {name}, {dtype}", partial(attend, *shape, dtype))
        for name, shape in MODELS.items()
        for dtype in DTYPES
    ),
    *((f"attention, Kimi Linear's latents, {dtype}", partial(attend, 32, 1, 576, dtype, rank=512)) for dtype in DTYPES),
    *((f"attention, LFM3's windows, {dtype}", partial(attend, 16, 4, 128, dtype, window=256)) for dtype in DTYPES),
    ("attention, pages of 24", partial(attend, 32, 8, 128, torch.bfloat16, 24)),
]
