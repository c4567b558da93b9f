"""delta_update for all tokens of rows that feed drafts: each state is read once and stored once."""

import torch
from torch import Tensor
from triton import language as tl

from baton.kernels.delta_net.rule.triton_update import prepared, step_config, stepped
from baton.kernels.drafts import Drafts
from baton.kernels.drafts.triton_feed import clear, tokens_of
from baton.kernels.runtime.triton import launch
from baton.kernels.runtime.triton.jit import jit
from baton.kernels.runtime.triton.layout import row_stride
from baton.kernels.runtime.triton.sizes import cdiv, next_power_of_2
from baton.kernels.state_pool.triton_states import as_kept, put, widened


def delta_update_drafts(
    inputs: Tensor,
    key_heads: int,
    A: Tensor,
    dt_bias: Tensor,
    beta_scale: float,
    lower_bound: float | None,
    pool: Tensor,
    slots: Tensor,
    positions: Tensor,
    drafts: Drafts,
    fed: int,
) -> Tensor:
    """Advance states by the tokens of rows with drafts: return o, float32 [fed, Hv·Dv]. See Drafts.

    The pool may be strided in its first dimension. Padding rows may share a slot; its contents and their o are
    meaningless. o is 0 for fed tokens of no row.

    inputs: float32 [computed tokens, columns], q, k and v after the convolution, beta before the sigmoid [Hv], and the
        inputs of the decays, as many as dt_bias has.
    A, dt_bias, beta_scale, lower_bound: see delta_update.
    fed: number of tokens that are fed.
    """
    heads, width, size = pool.shape[1:]
    o = torch.empty(fed, heads * width, dtype=torch.float32, device=inputs.device)
    is_rounded, by_channel = pool.dtype == torch.bfloat16, len(dt_bias) > heads
    config = step_config(by_channel, width, size, pool.dtype, inputs.device)
    launch(
        _step_drafts,
        (heads * cdiv(width, config.blocks["BLOCK_P"]), len(slots)),
        *(inputs, A, dt_bias, pool.view(torch.int16) if is_rounded else pool),
        *(slots, positions, drafts.begins, drafts.offsets, o, fed, size**-0.5, beta_scale, lower_bound),
        config=config,
        HEADS=heads,
        WIDTH=width,
        SIZE=size,
        KEY_HEADS=key_heads,
        BY_CHANNEL=by_channel,
        COLUMNS=row_stride(inputs),
        SLOT=row_stride(pool),
        BLOCK_N=next_power_of_2(size),
    )
    return o


@jit
def _step_drafts(
    inputs_ptr,
    A_ptr,
    dt_bias_ptr,
    pool_ptr,
    slots_ptr,
    positions_ptr,
    begins_ptr,
    offsets_ptr,
    o_ptr,
    fed,
    scale,
    beta_scale,
    lower_bound,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    COLUMNS: tl.constexpr,
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
    position = tl.load(positions_ptr + row) - replays
    k_at: tl.constexpr = KEY_HEADS * SIZE
    v_at: tl.constexpr = 2 * k_at
    beta_at: tl.constexpr = v_at + HEADS * WIDTH
    # The decay is one number per channel, else one per head.
    g_at: tl.constexpr = beta_at + HEADS
    key_places = head // (HEADS // KEY_HEADS) * SIZE + n
    A = tl.load(A_ptr + head)
    dt_bias = tl.load(dt_bias_ptr + head * SIZE + n, has_n, other=0.0) if BY_CHANNEL else tl.load(dt_bias_ptr + head)
    o_ptr += head * WIDTH + p
    for token in range(count):
        token_ptr = inputs_ptr + (begin + token) * COLUMNS
        q = tl.load(token_ptr + key_places, has_n, other=0.0)
        k = tl.load(token_ptr + k_at + key_places, has_n, other=0.0)
        v = tl.load(token_ptr + v_at + head * WIDTH + p, has_p, other=0.0)
        beta = tl.load(token_ptr + beta_at + head)
        if BY_CHANNEL:
            g = tl.load(token_ptr + g_at + head * SIZE + n, has_n, other=0.0)
        else:
            g = tl.load(token_ptr + g_at + head)
        q, k, g, beta = prepared(q, k, g, beta, A, dt_bias, scale, beta_scale, lower_bound)
        state, o = stepped(state, q, k, v, g, beta, BY_CHANNEL)
        state = as_kept(state, places, position + token, pool_ptr)
        tl.store(o_ptr + (first + token) * (HEADS * WIDTH), o, has_p & (token >= replays))
        if token + 1 == stored:
            put(pool_ptr, state, inside)
    if row == tl.num_programs(1) - 1:
        clear(o_ptr, first + count, fed, has_p, HEADS * WIDTH)
