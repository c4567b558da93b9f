"""The decode step of a gated delta net: convolution, state update, norm and gate."""

from baton.kernels.delta_net.decode import native, reference
from baton.kernels.runtime.dispatch import dispatch

__all__ = ["delta_decode"]

delta_decode = dispatch(
    reference.delta_decode, (native.takes, native.delta_decode), triton="baton.kernels.delta_net.decode.triton"
)
