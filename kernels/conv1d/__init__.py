"""Causal depthwise convolution: shifted multiply-adds, which on a CPU beat the library's convolution."""

from torch import Tensor

from kernels.conv1d import cpu, reference
from kernels.conv1d.plan import ConvPlan, plan_conv
from kernels.conv1d.reference import conv1d_update

__all__ = ["ConvPlan", "conv1d_prefill", "conv1d_update", "plan_conv"]


def conv1d_prefill(x: Tensor, taps: Tensor, bias: Tensor | None, pool: Tensor, plan: ConvPlan) -> Tensor:
    """See reference.conv1d_prefill."""
    run = cpu.conv1d_prefill if x.device.type == "cpu" else reference.conv1d_prefill
    return run(x, taps, bias, pool, plan)
