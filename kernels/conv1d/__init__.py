"""Causal depthwise convolution: shifted multiply-adds, which on a CPU are faster than torch's convolution."""

from baton.kernels.conv1d import reference
from baton.kernels.conv1d.reference import conv1d_prefill
from baton.kernels.runtime.dispatch import dispatch

__all__ = ["conv1d_prefill", "conv1d_update"]

conv1d_update = dispatch(reference.conv1d_update, triton="baton.kernels.conv1d.triton_update")
