"""Mamba-2 decode: one token for each row, its state updated in place."""

from torch import Tensor

from kernels.state_update import cpu, reference

__all__ = ["selective_state_update"]


def selective_state_update(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, pool: Tensor, slots: Tensor
) -> Tensor:
    """See reference.selective_state_update."""
    run = cpu.selective_state_update if x.device.type == "cpu" else reference.selective_state_update
    return run(x, dt, A, B, C, D, pool, slots)
