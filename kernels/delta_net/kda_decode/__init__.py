"""Kimi Delta Attention of decoding rows: convolution, state update, norm and gate."""

from torch import Tensor

from baton.kernels.conv1d import conv1d_update
from baton.kernels.delta_net.kda import kda_update
from baton.kernels.delta_net.kda_constants import KdaConstants
from baton.kernels.delta_net.kda_decode import native, reference
from baton.kernels.norm.gated import gated_norm
from baton.kernels.runtime import triton as gpu

__all__ = ["kda_decode"]

TORCH = reference.KdaForms(conv1d_update, kda_update, gated_norm)


def kda_decode(
    projected: Tensor,
    forget: Tensor,
    gate: Tensor,
    constants: KdaConstants,
    conv_pool: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    positions: Tensor,
) -> Tensor:
    """See reference.kda_decode."""
    given = (projected, forget, gate, constants, conv_pool, state_pool, slots, positions)
    if gpu.takes(projected):
        from baton.kernels.delta_net.kda_decode import triton

        return triton.kda_decode(*given)
    if native.takes(projected, forget, gate, conv_pool, state_pool):
        return native.kda_decode(*given)
    return reference.kda_decode(*given, TORCH)
