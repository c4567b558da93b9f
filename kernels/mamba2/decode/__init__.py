"""The Mamba-2 mixer of decoding rows: convolution, state update, gate and norm; in three launches on a GPU."""

from torch import Tensor

from baton.kernels.conv1d import conv1d_update
from baton.kernels.mamba2.constants import MixerConstants
from baton.kernels.mamba2.decode import native, reference
from baton.kernels.mamba2.state_update import selective_state_update
from baton.kernels.norm.gated import gated_norm
from baton.kernels.runtime import triton as gpu

__all__ = ["mixer_decode"]

TORCH = reference.Forms(conv1d_update, selective_state_update, gated_norm)


def mixer_decode(
    projected: Tensor,
    constants: MixerConstants,
    conv_pool: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    positions: Tensor,
) -> Tensor:
    """See reference.mixer_decode."""
    if gpu.takes(projected):
        from baton.kernels.mamba2.decode import triton

        return triton.mixer_decode(projected, constants, conv_pool, state_pool, slots, positions)
    if native.takes(projected, constants, conv_pool, state_pool):
        return native.mixer_decode(projected, constants, conv_pool, state_pool, slots, positions)
    return reference.mixer_decode(projected, constants, conv_pool, state_pool, slots, positions, TORCH)
