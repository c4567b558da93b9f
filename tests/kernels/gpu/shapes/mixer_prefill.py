"""Prefill of Mamba-2 mixers: convolution, scan, gated norm."""

from collections.abc import Callable
from functools import partial

import torch

from baton.kernels.mamba2.prefill import triton
from baton.kernels.prefill.plan import PrefillPlan, plan_prefill
from tests.kernels.gpu.shapes.mamba2 import SHAPES, MixerShape


def plan_of(shape: MixerShape) -> PrefillPlan:
    return plan_prefill([0, 200, 201], [64, 0], [2, 0], [(0, 100, 1)], 256, shape.kernel, torch.device("meta"))


def prefill(shape: MixerShape, dtype: torch.dtype, states: torch.dtype) -> None:
    plan = plan_of(shape)
    projected = shape.projected(plan.tokens, dtype)
    triton.mixer_prefill(projected, shape.constants(), *shape.pools(9, states), plan)


F32, BF16 = torch.float32, torch.bfloat16
CASES: list[tuple[str, Callable[[], None]]] = [
    (f"{name} {dtype} {states}", partial(prefill, shape, dtype, states))
    for name, shape in SHAPES.items()
    for dtype, states in [(BF16, F32), (F32, F32), (BF16, BF16)]
]
