"""Gated RMS norm."""

from torch import Tensor

from baton.kernels.norm.gated import cpu, reference
from baton.kernels.norm.gated.reference import Activation
from baton.kernels.runtime import triton as gpu

__all__ = ["gated_norm"]


def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    groups: int = 1,
    norm_before_gate: bool = False,
    activation: Activation = "silu",
) -> Tensor:
    """See reference.gated_norm."""
    if gpu.takes(x):
        from baton.kernels.norm.gated import triton

        return triton.gated_norm(x, gate, weight, eps, groups, norm_before_gate, activation)
    run = cpu.gated_norm if x.device.type == "cpu" and len(x) > cpu.BLOCK else reference.gated_norm
    return run(x, gate, weight, eps, groups, norm_before_gate, activation)
