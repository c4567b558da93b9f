"""Activations of feed-forward layers, and gates."""

from torch import Tensor

from baton.kernels.activations import native, reference
from baton.kernels.runtime import triton as gpu

__all__ = ["sigmoid_gate", "silu_multiply", "squared_relu"]


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """See reference.sigmoid_gate."""
    if gpu.takes(x):
        from baton.kernels.activations import triton

        return triton.sigmoid_gate(x, gate)
    run = native.sigmoid_gate if native.takes_gated(x, gate) else reference.sigmoid_gate
    return run(x, gate)


def silu_multiply(x: Tensor) -> Tensor:
    """See reference.silu_multiply."""
    if gpu.takes(x):
        from baton.kernels.activations import triton

        return triton.silu_multiply(x)
    return native.silu_multiply(x) if native.takes(x) else reference.silu_multiply(x)


def squared_relu(x: Tensor) -> Tensor:
    """See reference.squared_relu."""
    if gpu.takes(x):
        from baton.kernels.activations import triton

        return triton.squared_relu(x)
    return native.squared_relu(x) if native.takes(x) else reference.squared_relu(x)
