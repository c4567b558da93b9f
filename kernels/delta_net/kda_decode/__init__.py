"""The decode step of Kimi Delta Attention: convolution, state update, norm and gate."""

from baton.kernels.delta_net.kda_decode import native, reference
from baton.kernels.runtime.dispatch import dispatch

__all__ = ["kda_decode"]

kda_decode = dispatch(
    reference.kda_decode, (native.takes, native.kda_decode), triton="baton.kernels.delta_net.kda_decode.triton"
)
