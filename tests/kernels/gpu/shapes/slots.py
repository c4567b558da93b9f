"""Operations on whole slots and pages."""

from collections.abc import Callable
from functools import partial

import torch

from baton.kernels.state_pool import triton


def all_four(size: int) -> None:
    pool = torch.empty(9, size, dtype=torch.uint8, device="meta")
    index = torch.empty(3, dtype=torch.int64, device="meta")
    triton.copy(pool, index, index)
    triton.clear(pool, index)
    triton.scatter(pool, index, triton.gather(pool, index))


SIZES = {
    "a state of mamba2-130m": 24 * (24 * 64 * 128 + 3 * 1792) * 4,
    "a small page": 1024,
    "one line": 64,
    "odd": 832,
}
CASES: list[tuple[str, Callable[[], None]]] = [(name, partial(all_four, size)) for name, size in SIZES.items()]
