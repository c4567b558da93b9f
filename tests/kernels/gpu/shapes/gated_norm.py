"""Gated norm of a prefill's tokens, and of single heads."""

from collections.abc import Callable
from functools import partial

import torch

from baton.kernels.norm.gated import triton
from baton.kernels.norm.gated.reference import Activation
from tests.kernels.gpu.shapes.mamba2 import SHAPES

BF16 = torch.bfloat16


def norm(
    channels: int,
    groups: int,
    norm_before_gate: bool,
    x: torch.dtype,
    normed: bool = True,
    activation: Activation = "silu",
) -> None:
    gate = torch.empty(8192, 2 * channels, dtype=BF16, device="meta")[:, :channels]
    weight = torch.empty(channels, dtype=torch.float32, device="meta") if normed else None
    triton.gated_norm(gate.to(x), gate, weight, 1e-6, groups, norm_before_gate, activation, dtype=BF16)


CASES: list[tuple[str, Callable[[], None]]] = [
    *(
        (f"{name} {x}", partial(norm, s.inner, s.groups, s.norm_before_gate, x, s.normed))
        for name, s in SHAPES.items()
        for x in (BF16, torch.float32)
    ),
    ("32 heads of 128, norm first", partial(norm, 4096, 32, True, torch.float32)),
    ("32 heads of 128, by a sigmoid", partial(norm, 4096, 32, True, torch.float32, True, "sigmoid")),
    ("48 heads of 80, norm first", partial(norm, 3840, 48, True, BF16)),
]
