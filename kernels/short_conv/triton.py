"""The operations of reference.py in Triton: three launches for prompts; one for decoding rows, also with drafts."""

import torch
from torch import Tensor
from triton import language as tl

from baton.kernels.conv1d.triton import conv1d_prefill
from baton.kernels.conv1d.triton_update import CANDIDATES, summed
from baton.kernels.drafts import Drafts, check_ring
from baton.kernels.drafts.triton_feed import clear, tokens_of
from baton.kernels.prefill.plan import PrefillPlan
from baton.kernels.runtime.triton import KernelConfig, by_shape, config_of, launch
from baton.kernels.runtime.triton.jit import jit
from baton.kernels.runtime.triton.layout import row_stride
from baton.kernels.runtime.triton.sizes import cdiv
from baton.kernels.short_conv.constants import ShortConvConstants


def short_conv_prefill(projected: Tensor, constants: ShortConvConstants, pool: Tensor, plan: PrefillPlan) -> Tensor:
    """Compute reference.short_conv_prefill. `projected` and the pool may be strided in their first dimension."""
    c, channels = constants, constants.taps.shape[1]
    inputs = projected[:, :channels] * projected[:, 2 * channels :]
    return conv1d_prefill(inputs, c.taps, c.bias, pool, plan.table, gate=projected[:, channels : 2 * channels])


def short_conv_decode(
    projected: Tensor, constants: ShortConvConstants, pool: Tensor, slots: Tensor, positions: Tensor
) -> Tensor:
    """Compute reference.short_conv_decode. `projected` and the pool may be strided in their first dimension.

    Padding rows may share a slot that no other row has; the slot's contents and the results of padding rows are
    meaningless.
    """
    return _decode(projected, constants, pool, slots, None, None)


def short_conv_decode_drafts(
    projected: Tensor,
    constants: ShortConvConstants,
    pool: Tensor,
    slots: Tensor,
    positions: Tensor,
    drafts: Drafts,
    ring: Tensor,
) -> Tensor:
    """Compute the tokens of rows with drafts, see drafts/reference.py:decode_drafts. The host reads no tensor.

    The numbers of a captured step may be larger than those of its rows, see Drafts. Results of tokens that no row feeds
    are 0.
    """
    check_ring(drafts, ring, constants.taps.shape[1], projected.dtype)
    return _decode(projected, constants, pool, slots, drafts, ring)


def _decode(
    projected: Tensor, c: ShortConvConstants, pool: Tensor, slots: Tensor, drafts: Drafts | None, ring: Tensor | None
) -> Tensor:
    (kernel, channels), tokens = c.taps.shape, len(projected)
    y = torch.empty(tokens, channels, dtype=projected.dtype, device=projected.device)
    config = _config(channels, kernel, projected.device)
    numbers = (None,) * 3 if drafts is None else (drafts.begins, drafts.offsets, drafts.rings)
    launch(
        _update,
        (cdiv(channels, config.blocks["BLOCK"]), len(slots)),
        *(projected, c.taps, c.bias, pool, ring, slots, *numbers, y, tokens),
        config=config,
        CHANNELS=channels,
        KERNEL=kernel,
        ROW=row_stride(projected),
        SLOT=row_stride(pool),
        RING=0 if ring is None else row_stride(ring),
    )
    return y


@by_shape
def _config(channels: int, kernel: int, device: torch.device) -> KernelConfig:
    return config_of("short_conv.update", f"channels={channels} kernel={kernel}", device, *CANDIDATES)


@jit
def _update(
    projected_ptr,
    taps_ptr,
    bias_ptr,
    pool_ptr,
    ring_ptr,
    slots_ptr,
    begins_ptr,
    offsets_ptr,
    rings_ptr,
    y_ptr,
    tokens,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    ROW: tl.constexpr,
    SLOT: tl.constexpr,
    RING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute BLOCK channels of all tokens of one row; without drafts (begins_ptr is None) that is one token."""
    row = tl.program_id(1).to(tl.int64)
    channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < CHANNELS
    history_ptr = pool_ptr + tl.load(slots_ptr + row).to(tl.int64) * SLOT + channels
    projected_ptr += channels
    y_ptr += channels
    window, taps, bias = tl.tuple([]), tl.tuple([]), None
    for k in tl.static_range(KERNEL - 1):
        window += (tl.load(history_ptr + k * CHANNELS, inside, other=0.0),)
    for k in tl.static_range(KERNEL):
        taps += (tl.load(taps_ptr + k * CHANNELS + channels, inside, other=0.0),)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + channels, inside, other=0.0)

    if begins_ptr is None:
        inputs = _inputs(projected_ptr + row * ROW, inside, CHANNELS)
        window += (inputs.to(tl.float32),)
        _store_output(y_ptr, projected_ptr, row, window, taps, bias, inside, CHANNELS, KERNEL, ROW)
        for k in tl.static_range(KERNEL - 1):
            tl.store(history_ptr + k * CHANNELS, window[k + 1], inside)
    else:
        _, first, replays, stored, count = tokens_of(begins_ptr, offsets_ptr, row)
        ring_ptr += tl.load(rings_ptr + row).to(tl.int64) * RING + channels
        for token in range(replays):
            inputs = tl.load(ring_ptr + token * CHANNELS, inside, other=0.0)
            window += (inputs.to(tl.float32),)
            window = window[1:]
        for token in range(replays, stored):
            inputs = _inputs(projected_ptr + (first + token) * ROW, inside, CHANNELS)
            window += (inputs.to(tl.float32),)
            _store_output(y_ptr, projected_ptr, first + token, window, taps, bias, inside, CHANNELS, KERNEL, ROW)
            window = window[1:]
        # Threads may load and store different columns, because layouts depend on dtypes: finish all loads from the
        # ring and the pool before the first store to them.
        tl.debug_barrier()
        for k in tl.static_range(KERNEL - 1):
            tl.store(history_ptr + k * CHANNELS, window[k], inside)
        for token in range(stored, count):
            inputs = _inputs(projected_ptr + (first + token) * ROW, inside, CHANNELS)
            tl.store(ring_ptr + (token - stored) * CHANNELS, inputs, inside)
            window += (inputs.to(tl.float32),)
            _store_output(y_ptr, projected_ptr, first + token, window, taps, bias, inside, CHANNELS, KERNEL, ROW)
            window = window[1:]
        if row == tl.num_programs(1) - 1:
            clear(y_ptr, first + count, tokens, inside, CHANNELS)


@jit
def _inputs(token_ptr, inside, CHANNELS: tl.constexpr):
    """Return the convolution's inputs of a token, B·x, in the dtype of both. token_ptr: pointers to its B."""
    B = tl.load(token_ptr, inside, other=0.0)
    x = tl.load(token_ptr + 2 * CHANNELS, inside, other=0.0)
    return (B.to(tl.float32) * x.to(tl.float32)).to(B.dtype)


@jit
def _store_output(
    y_ptr,
    projected_ptr,
    token,
    window,
    taps,
    bias,
    inside,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    ROW: tl.constexpr,
):
    """Store C times the convolution of a token's KERNEL inputs. projected_ptr: pointers to the B of token 0."""
    gate = tl.load(projected_ptr + token * ROW + CHANNELS, inside, other=0.0).to(tl.float32)
    y = gate * summed(window, taps, bias, KERNEL)
    tl.store(y_ptr + token * CHANNELS, y.to(y_ptr.dtype.element_ty), inside)
