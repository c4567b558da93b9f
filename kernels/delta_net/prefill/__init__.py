"""The prefill step of a gated delta net: convolution, scan, norm and gate."""

from baton.kernels.delta_net.prefill import native, reference
from baton.kernels.runtime.dispatch import dispatch

__all__ = ["delta_prefill"]

delta_prefill = dispatch(
    reference.delta_prefill, (native.takes, native.delta_prefill), triton="baton.kernels.delta_net.prefill.triton"
)
