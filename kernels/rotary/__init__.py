"""Rotary position embedding."""

from torch import Tensor

from kernels import gpu
from kernels.rotary import native, reference

__all__ = ["rotate"]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See reference.rotate."""
    if gpu.takes(x):
        from kernels.rotary import triton

        return triton.rotate(x, cos, sin)
    return (native.rotate if native.takes(x, cos, sin) else reference.rotate)(x, cos, sin)
