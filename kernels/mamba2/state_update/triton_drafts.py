"""selective_state_update for all tokens of rows that feed drafts: each state is read once and stored once."""

import torch
from torch import Tensor
from triton import language as tl

from baton.kernels.drafts import Drafts
from baton.kernels.drafts.triton_feed import clear, tokens_of
from baton.kernels.mamba2.constants import MixerConstants
from baton.kernels.mamba2.state_update.triton import step_config, stepped
from baton.kernels.runtime.triton import launch
from baton.kernels.runtime.triton.functions import clamp, softplus
from baton.kernels.runtime.triton.jit import jit
from baton.kernels.runtime.triton.layout import row_stride
from baton.kernels.runtime.triton.sizes import cdiv, next_power_of_2
from baton.kernels.state_pool.triton_states import as_kept, put, widened


def state_update_drafts(
    inputs: Tensor,
    constants: MixerConstants,
    pool: Tensor,
    slots: Tensor,
    positions: Tensor,
    drafts: Drafts,
    fed: int,
) -> Tensor:
    """Advance states by the tokens of rows with drafts: return y, float32 [fed, H·P]. See Drafts.

    The pool may be strided in its first dimension. Padding rows may share a slot; its contents and their y are
    meaningless. y is 0 for fed tokens of no row.

    inputs: float32 [computed tokens, channels + H], x, B and C after the convolution, and dt before its bias.
    fed: number of tokens that are fed.
    """
    (heads, width, size), c = pool.shape[1:], constants
    y = torch.empty(fed, heads * width, dtype=torch.float32, device=inputs.device)
    is_rounded = pool.dtype == torch.bfloat16
    config = step_config(width, size, pool.dtype, inputs.device)
    launch(
        _step_drafts,
        (heads * cdiv(width, config.blocks["BLOCK_P"]), len(slots)),
        *(inputs, c.A, c.D, c.dt_bias, pool.view(torch.int16) if is_rounded else pool),
        *(slots, positions, drafts.begins, drafts.offsets, y, fed, *c.dt_limits),
        config=config,
        HEADS=heads,
        WIDTH=width,
        SIZE=size,
        GROUPS=(c.taps.shape[1] - heads * width) // (2 * size),
        SLOT=row_stride(pool),
        BLOCK_N=next_power_of_2(size),
    )
    return y


@jit
def _step_drafts(
    inputs_ptr,
    A_ptr,
    D_ptr,
    dt_bias_ptr,
    pool_ptr,
    slots_ptr,
    positions_ptr,
    begins_ptr,
    offsets_ptr,
    y_ptr,
    fed,
    dt_low,
    dt_high,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    SLOT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Advance BLOCK_P rows of the state of one head by all tokens of a row. pool_ptr: float32, or bfloat16 as int16."""
    row = tl.program_id(1).to(tl.int64)
    blocks: tl.constexpr = (WIDTH + BLOCK_P - 1) // BLOCK_P
    head = tl.program_id(0) // blocks
    p = tl.program_id(0) % blocks * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    has_p, has_n = p < WIDTH, n < SIZE
    inside = has_p[:, None] & has_n[None, :]
    places = (head * WIDTH + p)[:, None] * SIZE + n[None, :]
    begin, first, replays, stored, count = tokens_of(begins_ptr, offsets_ptr, row)
    pool_ptr += tl.load(slots_ptr + row).to(tl.int64) * SLOT + places
    state = widened(tl.load(pool_ptr, inside & (count > 0), other=0))  # rows of padding need no state
    A, D, dt_bias = tl.load(A_ptr + head), tl.load(D_ptr + head), tl.load(dt_bias_ptr + head)
    position = tl.load(positions_ptr + row) - replays
    B_at: tl.constexpr = HEADS * WIDTH
    C_at: tl.constexpr = B_at + GROUPS * SIZE
    dt_at: tl.constexpr = C_at + GROUPS * SIZE
    group_places = head // (HEADS // GROUPS) * SIZE + n
    y_ptr += head * WIDTH + p
    for token in range(count):
        token_ptr = inputs_ptr + (begin + token) * (dt_at + HEADS)
        x = tl.load(token_ptr + head * WIDTH + p, has_p, other=0.0)
        B = tl.load(token_ptr + B_at + group_places, has_n, other=0.0)
        C = tl.load(token_ptr + C_at + group_places, has_n, other=0.0)
        dt = clamp(softplus(tl.load(token_ptr + dt_at + head) + dt_bias), dt_low, dt_high)
        state, y = stepped(state, x, dt, A, B, C, D)
        state = as_kept(state, places, position + token, pool_ptr)
        tl.store(y_ptr + (first + token) * (HEADS * WIDTH), y, has_p & (token >= replays))
        if token + 1 == stored:
            put(pool_ptr, state, inside)
    if row == tl.num_programs(1) - 1:
        clear(y_ptr, first + count, fed, has_p, HEADS * WIDTH)
