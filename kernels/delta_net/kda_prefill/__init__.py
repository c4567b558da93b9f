"""The prefill step of Kimi Delta Attention: convolution, scan, norm and gate."""

from baton.kernels.delta_net.kda_prefill import native, reference
from baton.kernels.runtime.dispatch import dispatch

__all__ = ["kda_prefill"]

kda_prefill = dispatch(
    reference.kda_prefill, (native.takes, native.kda_prefill), triton="baton.kernels.delta_net.kda_prefill.triton"
)
