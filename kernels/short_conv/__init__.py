"""The gated short convolution of LFM2 between its two projections, over prompts and for decoding rows."""

from torch import Tensor

from baton.kernels.drafts import Drafts, check_ring
from baton.kernels.drafts.reference import decode_drafts
from baton.kernels.runtime.dispatch import dispatch
from baton.kernels.runtime.triton import takes
from baton.kernels.short_conv import native, reference
from baton.kernels.short_conv.constants import ShortConvConstants

__all__ = ["ShortConvConstants", "short_conv_decode", "short_conv_decode_drafts", "short_conv_prefill"]

TRITON = "baton.kernels.short_conv.triton"

short_conv_prefill = dispatch(reference.short_conv_prefill, (native.takes, native.short_conv_prefill), triton=TRITON)
short_conv_decode = dispatch(reference.short_conv_decode, (native.takes, native.short_conv_decode), triton=TRITON)


def short_conv_decode_drafts(
    projected: Tensor,
    constants: ShortConvConstants,
    pool: Tensor,
    slots: Tensor,
    positions: Tensor,
    drafts: Drafts,
    ring: Tensor,
) -> Tensor:
    """Compute the tokens of rows with drafts: [fed tokens, channels]. See drafts/reference.py:decode_drafts.

    ring: [rings, K, channels], the inputs B·x of the convolution.
    """
    if takes(projected):
        from baton.kernels.short_conv import triton

        return triton.short_conv_decode_drafts(projected, constants, pool, slots, positions, drafts, ring)
    if native.takes(projected, constants, pool):
        return native.short_conv_decode(projected, constants, pool, slots, positions, drafts, ring)
    check_ring(drafts, ring, pool.shape[2], projected.dtype)
    projections, columns = reference.gate_and_inputs(projected), (slice(0), slice(None))
    where = (pool,), slots, positions, drafts, ring
    return decode_drafts(reference.gated_update, projections, columns, constants, *where)
