"""Latent attention: writing its cache entries, and attention by heads, at the widths of models and at odd ones."""

from collections.abc import Callable
from functools import partial

import torch

from baton.kernels.attention.latents import triton as latents
from baton.kernels.attention.mla_cache import triton


def write(rank: int, shared: int, dtype: torch.dtype) -> None:
    projected = torch.empty(5, rank + shared, dtype=dtype, device="meta")
    pages = torch.empty(9, 2, 16, 1, rank + shared, dtype=dtype, device="meta")[:, 1]
    weight = torch.empty(rank, dtype=dtype, device="meta")
    triton.write_latents(projected, weight, 1e-6, pages, torch.empty(5, dtype=torch.int64, device="meta"))


def attend(heads: int, own: int, shared: int, value: int, rank: int, dtype: torch.dtype) -> None:
    """Attend by heads with 200 tokens that begin at position 70, after two others of the batch."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    query, pages = empty(202, heads, own + shared), empty(32, 2, 16, 1, rank + shared)[:, 1]
    table, weights = (
        torch.empty(17, dtype=torch.int32, device="meta"),
        (empty(heads, rank, own), empty(heads, value, rank)),
    )
    latents.attend_by_heads(query, pages, table, *weights, 0.1, 2, 200, 70, empty(202, heads, value))


DTYPES = (torch.bfloat16, torch.float32)
CASES: list[tuple[str, Callable[[], None]]] = [
    *(
        (f"{rank} {shared} {dtype}", partial(write, rank, shared, dtype))
        for rank, shared in ((512, 64), (37, 8))
        for dtype in DTYPES
    ),
    *(
        (f"by heads, {own} {shared} {value} {dtype}", partial(attend, heads, own, shared, value, rank, dtype))
        for heads, own, shared, value, rank in ((32, 128, 64, 128, 512), (3, 40, 20, 72, 100))
        for dtype in DTYPES
    ),
]
