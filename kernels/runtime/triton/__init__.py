"""Triton: the choice of tensors that it computes with, and its kernels' launches, block sizes and precision."""

from baton.kernels.runtime.triton.configs import KernelConfig, by_shape, chosen, config_of
from baton.kernels.runtime.triton.launching import Launch, launch, watched
from baton.kernels.runtime.triton.precision import dot_precision, use_tf32
from baton.kernels.runtime.triton.selection import computes_for, computes_on, leave_to_torch, takes

__all__ = [
    "KernelConfig",
    "Launch",
    "by_shape",
    "chosen",
    "computes_for",
    "computes_on",
    "config_of",
    "dot_precision",
    "launch",
    "leave_to_torch",
    "takes",
    "use_tf32",
    "watched",
]
