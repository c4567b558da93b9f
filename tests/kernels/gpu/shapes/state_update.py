"""One step of Mamba-2's recurrence from slot to slot, without a bias of dt."""

from collections.abc import Callable
from functools import partial

import torch

from baton.kernels.mamba2.state_update import triton
from tests.kernels.gpu.shapes.mamba2 import SHAPES, MixerShape


def step(s: MixerShape, states: torch.dtype) -> None:
    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, device="meta")

    index = torch.empty(5, dtype=torch.int64, device="meta")
    B = empty(5, s.groups, s.state)
    inputs = empty(5, s.heads, s.width), empty(5, s.heads), empty(s.heads), B, B, empty(s.heads)
    triton.selective_state_update(*inputs, s.pools(9, states)[1], index, index, targets=index)


CASES: list[tuple[str, Callable[[], None]]] = [
    (f"{name} {states}", partial(step, shape, states))
    for name, shape in SHAPES.items()
    for states in (torch.float32, torch.bfloat16)
]
