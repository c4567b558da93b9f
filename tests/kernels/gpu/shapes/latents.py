"""Writing the cache entries of latent attention, at the widths of models and at an odd one."""

from collections.abc import Callable
from functools import partial

import torch

from baton.kernels.attention.mla_cache import triton


def write(rank: int, shared: int, dtype: torch.dtype) -> None:
    projected = torch.empty(5, rank + shared, dtype=dtype, device="meta")
    pages = torch.empty(9, 2, 16, 1, rank + shared, dtype=dtype, device="meta")[:, 1]
    weight = torch.empty(rank, dtype=dtype, device="meta")
    triton.write_latents(projected, weight, 1e-6, pages, torch.empty(5, dtype=torch.int64, device="meta"))


CASES: list[tuple[str, Callable[[], None]]] = [
    (f"{rank} {shared} {dtype}", partial(write, rank, shared, dtype))
    for rank, shared in ((512, 64), (37, 8))
    for dtype in (torch.bfloat16, torch.float32)
]
