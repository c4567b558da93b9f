"""Projections with weights stored as integers, and inputs rounded to integers of 8 bits. Only in native code."""

from torch import Tensor

from baton.kernels.linear.int8_activations import native
from baton.kernels.linear.quantized import QuantizedWeight

__all__ = ["linear", "pays"]


def linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Compute reference.linear. weight: of the native layout.

    out: where to write the result, such as columns of a wider tensor; None for a new tensor.
    """
    return native.linear(x, weight.data, weight.form, weight.outputs, bias, out)


def pays() -> bool:
    """Return whether native code is installed, for a target with products of 8-bit integers."""
    return native.pays()
