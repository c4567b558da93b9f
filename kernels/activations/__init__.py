"""Activations of feed-forward layers, and gates."""

from baton.kernels.activations import native, reference
from baton.kernels.runtime.dispatch import dispatch

__all__ = ["sigmoid_gate", "silu_multiply", "squared_relu"]

TRITON = "baton.kernels.activations.triton"

sigmoid_gate = dispatch(reference.sigmoid_gate, (native.takes_gated, native.sigmoid_gate), triton=TRITON)
silu_multiply = dispatch(reference.silu_multiply, (native.takes, native.silu_multiply), triton=TRITON)
squared_relu = dispatch(reference.squared_relu, (native.takes, native.squared_relu), triton=TRITON)
