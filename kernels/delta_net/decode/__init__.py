"""The decode step of gated delta nets and Kimi Delta Attention: convolution, state update, norm and gate."""

from baton.kernels.delta_net.decode import native, reference
from baton.kernels.runtime.dispatch import dispatch

__all__ = ["delta_decode", "kda_decode"]

TRITON = "baton.kernels.delta_net.decode.triton"

delta_decode = dispatch(reference.delta_decode, (native.takes, native.delta_decode), triton=TRITON)
kda_decode = dispatch(reference.kda_decode, (native.takes_kda, native.kda_decode), triton=TRITON)
