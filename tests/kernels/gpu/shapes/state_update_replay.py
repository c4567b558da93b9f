"""Mamba-2's recurrence with a ring of inputs."""

from collections.abc import Callable
from functools import partial

import torch

from baton.kernels.mamba2.state_update import triton_replay
from baton.kernels.mamba2.state_update.replay import InputRing
from tests.kernels.gpu.shapes.mamba2 import SHAPES, MixerShape


def step_and_flush(s: MixerShape, dtype: torch.dtype) -> None:
    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, device="meta")

    ring = InputRing(empty(9, 16, s.heads, s.width), empty(9, 16, s.heads), empty(9, 16, s.groups, s.state))
    index = torch.empty(5, dtype=torch.int64, device="meta")
    convolved, (_, pool), c = empty(5, s.channels), s.pools(9, torch.float32), s.constants()
    x, B, C = convolved.split([s.inner, s.groups * s.state, s.groups * s.state], 1)
    x, B, C = x.unflatten(1, (s.heads, s.width)), B.unflatten(1, (s.groups, -1)), C.unflatten(1, (s.groups, -1))
    dt = s.projected(5, dtype)[:, s.inner + s.channels :]
    triton_replay.replay_state_update(
        *(x, dt, c.A, B, C, c.D, pool, index, index, ring, index, index), dt_bias=c.dt_bias, dt_limits=c.dt_limits
    )
    triton_replay.flush(pool, index, index, ring, index, index, index)


CASES: list[tuple[str, Callable[[], None]]] = [
    (f"{name} {dtype}", partial(step_and_flush, shape, dtype))
    for name, shape in SHAPES.items()
    for dtype in (torch.bfloat16, torch.float32)
]
