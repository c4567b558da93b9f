"""The decode step of the Mamba-2 mixer: convolution, state update, gate and norm; three launches on a GPU."""

from torch import Tensor

from baton.kernels.drafts import Drafts
from baton.kernels.drafts.reference import decode_drafts
from baton.kernels.mamba2.constants import MixerConstants
from baton.kernels.mamba2.decode import native, reference
from baton.kernels.mamba2.state_update import selective_state_update
from baton.kernels.runtime.triton import takes

__all__ = ["mixer_decode", "mixer_decode_drafts"]


def mixer_decode(
    projected: Tensor,
    constants: MixerConstants,
    conv_pool: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    positions: Tensor,
) -> Tensor:
    """Compute reference.mixer_decode with the fastest form that takes the tensors."""
    arguments = (projected, constants, conv_pool, state_pool, slots, positions)
    if takes(projected):
        from baton.kernels.mamba2.decode import triton

        return triton.mixer_decode(*arguments)
    if native.takes(projected, constants, conv_pool, state_pool):
        return native.mixer_decode(*arguments)
    return reference.mixer_decode(*arguments, selective_state_update)


def mixer_decode_drafts(
    projected: Tensor,
    constants: MixerConstants,
    conv_pool: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    positions: Tensor,
    drafts: Drafts,
    ring: Tensor,
) -> Tensor:
    """Compute the tokens of rows with drafts: [fed tokens, inner]. See drafts/reference.py:decode_drafts.

    ring: [rings, K, channels + H], the inputs x, B and C before the convolution, and dt.
    """
    arguments, where = (projected, constants, conv_pool, state_pool), (slots, positions, drafts, ring)
    if takes(projected):
        from baton.kernels.mamba2.decode import triton

        return triton.mixer_decode_drafts(*arguments, *where)
    if native.takes(*arguments):
        return native.mixer_decode(*arguments, *where)
    inner = state_pool.shape[1] * state_pool.shape[2]
    columns = (slice(inner, None),)
    return decode_drafts(mixer_decode, (projected,), columns, constants, (conv_pool, state_pool), *where)
