"""Rotary position embedding."""

from torch import Tensor

from baton.kernels import gpu
from baton.kernels.rotary import native, reference

__all__ = ["rotate"]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See reference.rotate."""
    if gpu.takes(x):
        from baton.kernels.rotary import triton

        return triton.rotate(x, cos, sin)
    return (native.rotate if native.takes(x, cos, sin) else reference.rotate)(x, cos, sin)
