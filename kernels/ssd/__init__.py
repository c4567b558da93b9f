"""Mamba-2 prefill: packed segments, initial states, checkpoints at exact positions."""

from torch import Tensor

from baton.kernels.ssd import cpu, reference
from baton.kernels.ssd.plan import ChunkPlan, plan_chunks, rounds_of

__all__ = ["ChunkPlan", "plan_chunks", "rounds_of", "ssd_prefill"]


def ssd_prefill(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, pool: Tensor, plan: ChunkPlan
) -> Tensor:
    """See reference.ssd_prefill."""
    run = cpu.ssd_prefill if x.device.type == "cpu" else reference.ssd_prefill
    return run(x, dt, A, B, C, D, pool, plan)
