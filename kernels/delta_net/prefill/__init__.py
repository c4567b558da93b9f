"""The prefill step of gated delta nets and Kimi Delta Attention: convolution, scan, norm and gate."""

from baton.kernels.delta_net.prefill import native, reference
from baton.kernels.runtime.dispatch import dispatch

__all__ = ["delta_prefill", "kda_prefill"]

TRITON = "baton.kernels.delta_net.prefill.triton"

delta_prefill = dispatch(reference.delta_prefill, (native.takes, native.delta_prefill), triton=TRITON)
kda_prefill = dispatch(reference.kda_prefill, (native.takes_kda, native.kda_prefill), triton=TRITON)
