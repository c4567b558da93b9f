"""Causal depthwise convolution: shifted multiply-adds, which on a CPU beat the library's convolution."""

from torch import Tensor

from baton.kernels.conv1d import cpu, reference
from baton.kernels.prefill.convolution import ConvPlan
from baton.kernels.runtime import triton

__all__ = ["conv1d_prefill", "conv1d_update"]


def conv1d_prefill(x: Tensor, taps: Tensor, bias: Tensor | None, pool: Tensor, plan: ConvPlan) -> Tensor:
    """See reference.conv1d_prefill."""
    run = cpu.conv1d_prefill if x.device.type == "cpu" else reference.conv1d_prefill
    return run(x, taps, bias, pool, plan)


def conv1d_update(x: Tensor, taps: Tensor, bias: Tensor | None, pool: Tensor, slots: Tensor) -> Tensor:
    """See reference.conv1d_update."""
    if triton.takes(x):
        from baton.kernels.conv1d import triton_update

        return triton_update.conv1d_update(x, taps, bias, pool, slots)
    return reference.conv1d_update(x, taps, bias, pool, slots)
