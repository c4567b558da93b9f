"""Mamba-2 decode: one token for each row, its state updated in place."""

from torch import Tensor

from baton.kernels.mamba2.state_update import cpu, reference, replay
from baton.kernels.mamba2.state_update.replay import InputRing
from baton.kernels.runtime import triton as gpu

__all__ = ["InputRing", "flush", "replay_state_update", "selective_state_update"]


def selective_state_update(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    pool: Tensor,
    slots: Tensor,
    positions: Tensor,
) -> Tensor:
    """See reference.selective_state_update."""
    if gpu.takes(x):
        from baton.kernels.mamba2.state_update import triton

        return triton.selective_state_update(x, dt, A, B, C, D, pool, slots, positions)
    run = cpu.selective_state_update if x.device.type == "cpu" else reference.selective_state_update
    return run(x, dt, A, B, C, D, pool, slots, positions)


def replay_state_update(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    pool: Tensor,
    slots: Tensor,
    positions: Tensor,
    ring: InputRing,
    places: Tensor,
    starts: Tensor,
) -> Tensor:
    """See replay.replay_state_update."""
    given = (x, dt, A, B, C, D, pool, slots, positions, ring, places, starts)
    if gpu.takes(x):
        from baton.kernels.mamba2.state_update import triton_replay

        return triton_replay.replay_state_update(*given)
    return replay.replay_state_update(*given)


def flush(
    pool: Tensor,
    slots: Tensor,
    positions: Tensor,
    ring: InputRing,
    places: Tensor,
    starts: Tensor,
    targets: Tensor | None = None,
) -> None:
    """See replay.flush."""
    if gpu.takes(pool):
        from baton.kernels.mamba2.state_update import triton_replay

        triton_replay.flush(pool, slots, positions, ring, places, starts, targets)
    else:
        replay.flush(pool, slots, positions, ring, places, starts, targets)
