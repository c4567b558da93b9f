"""The decode step of gated delta nets and Kimi Delta Attention: convolution, state update, norm and gate."""

from torch import Tensor

from baton.kernels.delta_net.constants import DeltaConstants, KdaConstants
from baton.kernels.delta_net.decode import native, reference
from baton.kernels.drafts import Drafts
from baton.kernels.drafts.reference import decode_drafts
from baton.kernels.runtime.dispatch import dispatch
from baton.kernels.runtime.triton import takes

__all__ = ["delta_decode", "delta_decode_drafts", "kda_decode", "kda_decode_drafts"]

TRITON = "baton.kernels.delta_net.decode.triton"

delta_decode = dispatch(reference.delta_decode, (native.takes, native.delta_decode), triton=TRITON)
kda_decode = dispatch(reference.kda_decode, (native.takes_kda, native.kda_decode), triton=TRITON)


def delta_decode_drafts(
    projected: Tensor,
    constants: DeltaConstants,
    conv_pool: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    positions: Tensor,
    drafts: Drafts,
    ring: Tensor,
) -> Tensor:
    """Compute the tokens of rows with drafts: [fed tokens, Hv·Dv]. See drafts/reference.py:decode_drafts.

    ring: [rings, K, channels + 2·Hv], the inputs before the convolution, and those of beta and the decays.
    """
    arguments, where = (projected, constants, conv_pool, state_pool), (slots, positions, drafts, ring)
    if takes(projected):
        from baton.kernels.delta_net.decode import triton

        return triton.delta_decode_drafts(*arguments, *where)
    if native.takes(*arguments):
        return native.delta_decode(*arguments, *where)
    columns = (slice(state_pool.shape[1] * state_pool.shape[2], None),)
    return decode_drafts(delta_decode, (projected,), columns, constants, (conv_pool, state_pool), *where)


def kda_decode_drafts(
    projected: Tensor,
    forget: Tensor,
    gate: Tensor,
    constants: KdaConstants,
    conv_pool: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    positions: Tensor,
    drafts: Drafts,
    ring: Tensor,
) -> Tensor:
    """Compute the tokens of rows with drafts: [fed tokens, H·Dv]. See drafts/reference.py:decode_drafts.

    ring: [rings, K, channels + H + H·Dk], the columns of `projected` and `forget`.
    """
    arguments, where = (projected, forget, gate, constants, conv_pool, state_pool), (slots, positions, drafts, ring)
    if takes(projected):
        from baton.kernels.delta_net.decode import triton

        return triton.kda_decode_drafts(*arguments, *where)
    if native.takes_kda(*arguments):
        return native.kda_decode(*arguments, *where)
    projections, columns = (projected, forget, gate), (slice(None), slice(None), slice(0))
    return decode_drafts(kda_decode, projections, columns, constants, (conv_pool, state_pool), *where)
