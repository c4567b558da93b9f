"""RMS norm of the residual stream, fused with the addition before it."""

from baton.kernels.norm.rms import native, reference
from baton.kernels.runtime.dispatch import dispatch

__all__ = ["add_rms_norm"]

add_rms_norm = dispatch(
    reference.add_rms_norm, (native.takes, native.add_rms_norm), triton="baton.kernels.norm.rms.triton"
)
