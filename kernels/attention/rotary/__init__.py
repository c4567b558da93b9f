"""Rotary position embedding."""

from baton.kernels.attention.rotary import native, reference
from baton.kernels.runtime.dispatch import dispatch

__all__ = ["rotate"]

rotate = dispatch(reference.rotate, (native.takes, native.rotate), triton="baton.kernels.attention.rotary.triton")
