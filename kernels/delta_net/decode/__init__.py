"""The gated delta net of decoding rows: convolution, state update, gate and norm."""

from torch import Tensor

from baton.kernels.conv1d import conv1d_update
from baton.kernels.delta_net.constants import DeltaConstants
from baton.kernels.delta_net.decode import native, reference
from baton.kernels.delta_net.gated import gated_delta_update
from baton.kernels.norm.gated import gated_norm
from baton.kernels.runtime import triton as gpu

__all__ = ["delta_decode"]

TORCH = reference.DeltaForms(conv1d_update, gated_delta_update, gated_norm)


def delta_decode(
    projected: Tensor,
    constants: DeltaConstants,
    conv_pool: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    positions: Tensor,
) -> Tensor:
    """See reference.delta_decode."""
    if gpu.takes(projected):
        from baton.kernels.delta_net.decode import triton

        return triton.delta_decode(projected, constants, conv_pool, state_pool, slots, positions)
    if native.takes(projected, conv_pool, state_pool):
        return native.delta_decode(projected, constants, conv_pool, state_pool, slots, positions)
    return reference.delta_decode(projected, constants, conv_pool, state_pool, slots, positions, TORCH)
