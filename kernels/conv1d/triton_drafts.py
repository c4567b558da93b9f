"""conv1d_update for all tokens of rows that feed drafts: the row's last inputs are read once and stored once."""

import torch
from torch import Tensor
from triton import language as tl

from baton.kernels.conv1d.triton_update import CANDIDATES, convolved
from baton.kernels.drafts import Drafts
from baton.kernels.drafts.triton_feed import tokens_of
from baton.kernels.runtime.triton import KernelConfig, by_shape, config_of, launch
from baton.kernels.runtime.triton.jit import jit
from baton.kernels.runtime.triton.layout import row_stride
from baton.kernels.runtime.triton.sizes import cdiv


def conv1d_drafts(
    x: Tensor,
    more: Tensor | None,
    taps: Tensor,
    bias: Tensor | None,
    pool: Tensor,
    slots: Tensor,
    drafts: Drafts,
    ring: Tensor,
) -> Tensor:
    """Convolve the tokens of rows with drafts: float32 [drafts.tokens, columns of the ring]. See Drafts.

    Columns that the convolution does not have are copied, so that later launches read every input of a replayed token
    here. They could not read the ring, because this launch writes the new drafts' inputs to it. A program reads its
    columns of a row's ring before it writes them, and no other program has the same columns and row.

    x: [fed tokens, channels + others], the inputs of the convolution and other inputs of the layer.
    more: [fed tokens, …], inputs of the layer in another tensor, or None. x, more and the pool may be strided in their
        first dimension.
    ring: [rings, K, columns of x and more], contiguous, in the dtype of x and more. The inputs of a row's new drafts go
        to its beginning.
    taps, bias, pool, slots: see reference.conv1d_update. Padding rows may share a slot and a ring, if they replay
        nothing and feed one token at most; the slot's contents and the results of these rows are meaningless.
    """
    rows, (kernel, channels), (columns, width) = len(slots), taps.shape, (ring.shape[2], x.shape[1])
    y = torch.empty(drafts.tokens, columns, dtype=torch.float32, device=x.device)
    config = _config(columns, kernel, x.device)
    launch(
        _update_drafts,
        (cdiv(columns, config.blocks["BLOCK"]), rows),
        *(x, more, taps, bias, pool, ring, slots, drafts.begins, drafts.offsets, drafts.rings, y),
        config=config,
        CHANNELS=channels,
        COLUMNS=columns,
        X_COLUMNS=width,
        KERNEL=kernel,
        X_ROW=row_stride(x),
        MORE_ROW=0 if more is None else row_stride(more),
        SLOT=row_stride(pool),
        RING=row_stride(ring),
    )
    return y


@by_shape
def _config(columns: int, kernel: int, device: torch.device) -> KernelConfig:
    return config_of("conv1d.update_drafts", f"columns={columns} kernel={kernel}", device, *CANDIDATES)


@jit
def _update_drafts(
    x_ptr,
    more_ptr,
    taps_ptr,
    bias_ptr,
    pool_ptr,
    ring_ptr,
    slots_ptr,
    begins_ptr,
    offsets_ptr,
    rings_ptr,
    y_ptr,
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
    X_COLUMNS: tl.constexpr,
    KERNEL: tl.constexpr,
    X_ROW: tl.constexpr,
    MORE_ROW: tl.constexpr,
    SLOT: tl.constexpr,
    RING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute BLOCK columns of all tokens of one row."""
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, has_tap = columns < COLUMNS, columns < CHANNELS
    begin, first, replays, stored, count = tokens_of(begins_ptr, offsets_ptr, row)
    history_ptr = pool_ptr + tl.load(slots_ptr + row).to(tl.int64) * SLOT + columns
    ring_ptr += tl.load(rings_ptr + row).to(tl.int64) * RING + columns
    y_ptr += begin * COLUMNS + columns
    window, taps, bias = tl.tuple([]), tl.tuple([]), None
    for k in tl.static_range(KERNEL - 1):
        window += (tl.load(history_ptr + k * CHANNELS, has_tap, other=0.0),)
    for k in tl.static_range(KERNEL):
        taps += (tl.load(taps_ptr + k * CHANNELS + columns, has_tap, other=0.0),)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + columns, has_tap, other=0.0)

    for token in range(replays):
        x = tl.load(ring_ptr + token * COLUMNS, inside, other=0.0)
        window = _next(x, window, taps, bias, y_ptr + token * COLUMNS, inside, has_tap, KERNEL)
    for token in range(replays, stored):
        x = _inputs(x_ptr, more_ptr, first + token, columns, COLUMNS, X_COLUMNS, X_ROW, MORE_ROW)
        window = _next(x, window, taps, bias, y_ptr + token * COLUMNS, inside, has_tap, KERNEL)
    # Threads may load and store different columns, because layouts depend on dtypes: finish all loads from the ring and
    # the pool before the first store to them.
    tl.debug_barrier()
    for k in tl.static_range(KERNEL - 1):
        tl.store(history_ptr + k * CHANNELS, window[k], has_tap)
    for token in range(stored, count):
        x = _inputs(x_ptr, more_ptr, first + token, columns, COLUMNS, X_COLUMNS, X_ROW, MORE_ROW)
        tl.store(ring_ptr + (token - stored) * COLUMNS, x, inside)
        window = _next(x, window, taps, bias, y_ptr + token * COLUMNS, inside, has_tap, KERNEL)


@jit
def _inputs(
    x_ptr,
    more_ptr,
    token,
    columns,
    COLUMNS: tl.constexpr,
    X_COLUMNS: tl.constexpr,
    X_ROW: tl.constexpr,
    MORE_ROW: tl.constexpr,
):
    """Return the inputs of a fed token, in their dtype. token: int64."""
    x = tl.load(x_ptr + token * X_ROW + columns, columns < X_COLUMNS, other=0.0)
    if more_ptr is not None:
        is_more = (columns >= X_COLUMNS) & (columns < COLUMNS)
        more = tl.load(more_ptr + token * MORE_ROW + (columns - X_COLUMNS), is_more, other=0.0)
        x = tl.where(is_more, more, x)
    return x


@jit
def _next(x, window, taps, bias, y_ptr, inside, has_tap, KERNEL: tl.constexpr):
    """Store a token's results, and return the last KERNEL - 1 inputs."""
    x = x.to(tl.float32)
    window += (x,)
    tl.store(y_ptr, tl.where(has_tap, convolved(window, taps, bias, KERNEL), x), inside)
    return window[1:]
