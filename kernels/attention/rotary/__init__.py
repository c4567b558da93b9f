"""Rotary position embedding."""

from torch import Tensor

from baton.kernels.attention.rotary import native, reference
from baton.kernels.runtime import triton as gpu

__all__ = ["rotate"]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See reference.rotate."""
    if gpu.takes(x):
        from baton.kernels.attention.rotary import triton

        return triton.rotate(x, cos, sin)
    return (native.rotate if native.takes(x, cos, sin) else reference.rotate)(x, cos, sin)
