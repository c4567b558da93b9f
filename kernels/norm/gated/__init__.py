"""RMS norm with a gate."""

from baton.kernels.norm.gated import reference
from baton.kernels.runtime.dispatch import dispatch

__all__ = ["gated_norm"]

gated_norm = dispatch(reference.gated_norm, triton="baton.kernels.norm.gated.triton")
