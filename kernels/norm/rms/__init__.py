"""RMS norm of a residual stream, and the addition before it."""

from torch import Tensor

from baton.kernels.norm.rms import native, reference
from baton.kernels.runtime import triton as gpu

__all__ = ["add_rms_norm"]


def add_rms_norm(
    residual: Tensor, x: Tensor | None, weight: Tensor, eps: float, multiplier: float = 1.0, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """See reference.add_rms_norm."""
    if gpu.takes(residual):
        from baton.kernels.norm.rms import triton

        return triton.add_rms_norm(residual, x, weight, eps, multiplier, offset)
    run = native.add_rms_norm if native.takes(residual, x, weight) else reference.add_rms_norm
    return run(residual, x, weight, eps, multiplier, offset)
