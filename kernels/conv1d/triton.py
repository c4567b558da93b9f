"""reference.conv1d_prefill in Triton: one kernel convolves chunks, then another stores each segment's last inputs."""

import torch
from torch import Tensor
from triton import language as tl

from baton.kernels.prefill.chunk_table import LONGEST, ChunkTable
from baton.kernels.runtime.triton import KernelConfig, by_shape, config_of, launch
from baton.kernels.runtime.triton.functions import silu
from baton.kernels.runtime.triton.jit import jit
from baton.kernels.runtime.triton.layout import row_stride
from baton.kernels.runtime.triton.sizes import cdiv, next_power_of_2

# The configurations to choose from, the default first.
CANDIDATES = [KernelConfig({"BLOCK": block}, warps) for block, warps in [(64, 4), (128, 8), (64, 8), (128, 4)]]
ENDS_CONFIG = KernelConfig({"BLOCK": 256}, 2)
"""The configuration of _keep_ends."""


def conv1d_prefill(
    x: Tensor, taps: Tensor, bias: Tensor | None, pool: Tensor, table: ChunkTable, gate: Tensor | None = None
) -> Tensor:
    """Compute reference.conv1d_prefill, except that the result is in x's dtype, float32 or bfloat16.

    x, the gate and the pool may be strided in their first dimension.

    gate: [T, channels]; if given, the convolution is multiplied by it, without SiLU.
    """
    (tokens, channels), kernel = x.shape, len(taps)
    y = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    config = _config(channels, kernel, x.device)
    sizes = {
        "CHANNELS": channels,
        "KERNEL": kernel,
        "X_ROW": row_stride(x),
        "SLOT": row_stride(pool),
        "ROWS": next_power_of_2(max(1, kernel - 1)),
    }
    launch(
        _convolve,
        (cdiv(channels, config.blocks["BLOCK"]) * table.chunks,),
        *(x, taps, bias, gate, pool, y),
        *(table.slots, table.first, table.starts, table.owner, table.saves, table.saved),
        config=config,
        TOKENS=LONGEST,
        GATE_ROW=0 if gate is None else row_stride(gate),
        **sizes,
    )
    # This launch comes after _convolve, because it overwrites the slots that _convolve reads.
    launch(
        _keep_ends,
        (cdiv(channels, ENDS_CONFIG.blocks["BLOCK"]), table.segments if kernel > 1 else 0),
        *(x, pool, table.slots, table.first, table.starts),
        config=ENDS_CONFIG,
        **sizes,
    )
    return y


@by_shape
def _config(channels: int, kernel: int, device: torch.device) -> KernelConfig:
    return config_of("conv1d.prefill", f"channels={channels} kernel={kernel}", device, *CANDIDATES)


@jit
def _convolve(
    x_ptr,
    taps_ptr,
    bias_ptr,
    gate_ptr,
    pool_ptr,
    y_ptr,
    slots_ptr,
    first_ptr,
    starts_ptr,
    owner_ptr,
    saves_ptr,
    saved_ptr,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    X_ROW: tl.constexpr,
    SLOT: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    GATE_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute BLOCK channels of one chunk, and write the last inputs to the slots of the checkpoints at its end.

    A token's KERNEL inputs are its segment's tokens in x and, before the segment's first token, the history in the
    slot.
    """
    BLOCKS: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    chunk, token = (tl.program_id(0) // BLOCKS).to(tl.int64), tl.arange(0, TOKENS)
    channel = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    begin, end = tl.load(starts_ptr + chunk).to(tl.int64), tl.load(starts_ptr + chunk + 1).to(tl.int64)
    segment = tl.load(owner_ptr + chunk)
    segment_begin = tl.load(starts_ptr + tl.load(first_ptr + segment)).to(tl.int64)
    history_ptr = pool_ptr + tl.load(slots_ptr + segment).to(tl.int64) * SLOT
    live = token < (end - begin).to(tl.int32)
    before = tl.minimum(begin - segment_begin, KERNEL).to(tl.int32)  # the segment's tokens in x before this chunk

    y = tl.zeros([TOKENS, BLOCK], tl.float32)
    for k in tl.static_range(KERNEL):
        place = token - (KERNEL - 1 - k)
        of_x = (live & (place >= -before))[:, None] & inside[None, :]
        places = place[:, None] * X_ROW + channel[None, :]
        values = tl.load(x_ptr + begin * X_ROW + places, of_x, other=0.0).to(tl.float32)
        if before < KERNEL - 1 - k:
            of_history = (live & (place < -before))[:, None] & inside[None, :]
            places = (place + before + KERNEL - 1)[:, None] * CHANNELS + channel[None, :]
            values = tl.where(of_history, tl.load(history_ptr + places, of_history, other=0.0), values)
        y += values * tl.load(taps_ptr + k * CHANNELS + channel, inside, other=0.0)[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + channel, inside, other=0.0)[None, :]
    exists = live[:, None] & inside[None, :]
    if gate_ptr is None:
        y = silu(y)
    else:
        gate_places = token[:, None] * GATE_ROW + channel[None, :]
        y *= tl.load(gate_ptr + begin * GATE_ROW + gate_places, exists, other=0.0).to(tl.float32)
    y_places = token[:, None] * CHANNELS + channel[None, :]
    tl.store(y_ptr + begin * CHANNELS + y_places, y.to(y_ptr.dtype.element_ty), exists)

    # Write the checkpoints. No segment reads their slots, so nothing is overwritten that is still to be read.
    if KERNEL > 1:
        for save in range(tl.load(saves_ptr + chunk).to(tl.int32), tl.load(saves_ptr + chunk + 1).to(tl.int32)):
            segment_ptr, length = x_ptr + segment_begin * X_ROW, end - segment_begin
            last = _last_inputs(segment_ptr, history_ptr, length, channel, CHANNELS, KERNEL, X_ROW, ROWS)
            slot_ptr = pool_ptr + tl.load(saved_ptr + save).to(tl.int64) * SLOT
            _keep(slot_ptr, last, channel, CHANNELS, KERNEL, ROWS)


@jit
def _keep_ends(
    x_ptr,
    pool_ptr,
    slots_ptr,
    first_ptr,
    starts_ptr,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    X_ROW: tl.constexpr,
    SLOT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write BLOCK channels of a segment's last inputs to its own slot."""
    segment, channel = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    begin = tl.load(starts_ptr + tl.load(first_ptr + segment)).to(tl.int64)
    length = tl.load(starts_ptr + tl.load(first_ptr + segment + 1)).to(tl.int64) - begin
    own_ptr = pool_ptr + tl.load(slots_ptr + segment).to(tl.int64) * SLOT
    last = _last_inputs(x_ptr + begin * X_ROW, own_ptr, length, channel, CHANNELS, KERNEL, X_ROW, ROWS)
    tl.debug_barrier()  # A segment shorter than KERNEL - 1 moves rows within its slot: read all before writing any.
    _keep(own_ptr, last, channel, CHANNELS, KERNEL, ROWS)


@jit
def _last_inputs(
    x_ptr,
    history_ptr,
    length,
    channel,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    X_ROW: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Return the last inputs of a segment that begins at x_ptr: the first KERNEL - 1 rows of [ROWS, channels].

    Inputs before the segment come from its history. ROWS is KERNEL - 1, rounded up to a power of two.
    """
    row = tl.arange(0, ROWS)
    place = length - (KERNEL - 1) + row  # int64
    inside = (row < KERNEL - 1)[:, None] & (channel < CHANNELS)[None, :]
    of_x, of_history = inside & (place >= 0)[:, None], inside & (place < 0)[:, None]
    values = tl.load(x_ptr + (place[:, None] * X_ROW + channel[None, :]), of_x, other=0.0).to(tl.float32)
    places = (place + KERNEL - 1)[:, None] * CHANNELS + channel[None, :]
    return tl.where(of_x, values, tl.load(history_ptr + places, of_history, other=0.0))


@jit
def _keep(slot_ptr, rows, channel, CHANNELS: tl.constexpr, KERNEL: tl.constexpr, ROWS: tl.constexpr):
    """Write the first KERNEL - 1 of `rows`, which _last_inputs has returned, to a slot."""
    row = tl.arange(0, ROWS)
    inside = (row < KERNEL - 1)[:, None] & (channel < CHANNELS)[None, :]
    tl.store(slot_ptr + (row[:, None] * CHANNELS + channel[None, :]), rows, inside)
