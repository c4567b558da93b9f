"""RMS norm at the hidden widths of models, with and without an addition to the residual."""

from collections.abc import Callable
from functools import partial

import torch

from baton.kernels.norm.rms import triton


def norm(hidden: int, x: torch.dtype, residual: torch.dtype) -> None:
    weight, stream = torch.empty(hidden, dtype=x, device="meta"), torch.empty(5, hidden, dtype=residual, device="meta")
    triton.add_rms_norm(stream, torch.empty(5, hidden, dtype=x, device="meta"), weight, 1e-5, 0.5)
    triton.add_rms_norm(stream, None, weight, 1e-5)


F32, BF16 = torch.float32, torch.bfloat16
CASES: list[tuple[str, Callable[[], None]]] = [
    (f"{hidden} {x}", partial(norm, hidden, x, residual))
    for hidden in (768, 2560, 4096, 5120, 1130)
    for x, residual in [(BF16, F32), (BF16, BF16), (F32, F32)]
]
