"""Mamba-2 prefill: packed segments, initial states, checkpoints at exact positions."""

from torch import Tensor

from baton.kernels.mamba2.ssd import cpu, reference
from baton.kernels.prefill.scan import ChunkPlan

__all__ = ["ssd_prefill"]


def ssd_prefill(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, pool: Tensor, plan: ChunkPlan
) -> Tensor:
    """See reference.ssd_prefill."""
    run = cpu.ssd_prefill if x.device.type == "cpu" else reference.ssd_prefill
    return run(x, dt, A, B, C, D, pool, plan)
