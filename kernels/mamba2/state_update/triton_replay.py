"""The operations of replay.py in Triton. Each state is read once per token, and written only where a window ends."""

from math import inf

import torch
from torch import Tensor
from triton import language as tl

from baton.kernels.mamba2.state_update.replay import InputRing
from baton.kernels.mamba2.state_update.triton import advanced
from baton.kernels.runtime.triton import KernelConfig, by_shape, config_of, launch
from baton.kernels.runtime.triton.functions import clamp, softplus
from baton.kernels.runtime.triton.jit import jit
from baton.kernels.runtime.triton.layout import row_stride
from baton.kernels.runtime.triton.sizes import cdiv, next_power_of_2


def replay_state_update(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    pool: Tensor,
    slots: Tensor,
    positions: Tensor,
    ring: InputRing,
    places: Tensor,
    starts: Tensor,
    *,
    dt_bias: Tensor | None = None,
    dt_limits: tuple[float, float] = (0.0, inf),
) -> Tensor:
    """Compute replay.replay_state_update. x, dt, B and C may be float32 or bfloat16.

    These tensors, the pool and the ring may be strided in their first dimension. Padding rows may share a slot and a
    place in the ring, because neither the contents of both nor the padding rows of y are used.
    """
    rows, heads, width = x.shape
    y = torch.empty(rows, heads, width, dtype=torch.float32, device=x.device)
    config, constants = _prepared("mamba2.state_update.replay", pool, ring)
    launch(
        _replay,
        (heads * cdiv(width, config.blocks["BLOCK_P"]), rows),
        *(x, dt, A, B, C, D, dt_bias, pool, ring.x_dt, ring.decay, ring.B),
        *(slots, positions, places, starts, y, *dt_limits),
        config=config,
        X_ROW=row_stride(x),
        DT_ROW=row_stride(dt),
        NEW_B_ROW=row_stride(B),
        C_ROW=row_stride(C),
        **constants,
    )
    return y


def flush(
    pool: Tensor,
    slots: Tensor,
    positions: Tensor,
    ring: InputRing,
    places: Tensor,
    starts: Tensor,
    targets: Tensor | None = None,
) -> None:
    """Compute replay.flush. Rows may share a target if its contents are not used."""
    config, constants = _prepared("mamba2.state_update.flush", pool, ring)
    heads, width = pool.shape[1:3]
    launch(
        _flush,
        (heads * cdiv(width, config.blocks["BLOCK_P"]), len(slots)),
        *(pool, ring.x_dt, ring.decay, ring.B, slots, slots if targets is None else targets),
        *(positions, places, starts),
        config=config,
        **constants,
    )


def candidates(size: int) -> list[KernelConfig]:
    """Return the configurations to choose from, the default first.

    Blocks are larger than without a ring: each program of a group reads the ring's B, so fewer programs read less.
    """
    elements = [(2048, 1), (1024, 1), (4096, 1), (4096, 2), (8192, 4), (8192, 8)]
    columns = next_power_of_2(size)
    return [KernelConfig({"BLOCK_P": max(1, tile // columns)}, warps) for tile, warps in elements]


def _prepared(kernel: str, pool: Tensor, ring: InputRing) -> tuple[KernelConfig, dict[str, int]]:
    """Return a kernel's configuration and both kernels' constexprs. Raise ValueError for a wrong dtype or window."""
    heads, width, size = pool.shape[1:]
    window, groups = ring.B.shape[1:3]
    if pool.dtype != torch.float32 or window & (window - 1):
        raise ValueError(f"a pool of {pool.dtype} and a window of {window}, not float32 and a power of two")
    return _config(kernel, width, size, window, pool.device), {
        "HEADS": heads,
        "WIDTH": width,
        "SIZE": size,
        "GROUPS": groups,
        "WINDOW": window,
        "SLOT": row_stride(pool),
        "X_DT_ROW": row_stride(ring.x_dt),
        "DECAY_ROW": row_stride(ring.decay),
        "B_ROW": row_stride(ring.B),
        "BLOCK_N": next_power_of_2(size),
    }


@by_shape
def _config(kernel: str, width: int, size: int, window: int, device: torch.device) -> KernelConfig:
    return config_of(kernel, f"width={width} state={size} window={window}", device, *candidates(size))


@jit
def _replay(
    x_ptr,
    dt_ptr,
    A_ptr,
    new_B_ptr,
    C_ptr,
    D_ptr,
    dt_bias_ptr,
    pool_ptr,
    x_dt_ptr,
    decay_ptr,
    B_ptr,
    slots_ptr,
    positions_ptr,
    places_ptr,
    starts_ptr,
    y_ptr,
    dt_low,
    dt_high,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    WINDOW: tl.constexpr,
    SLOT: tl.constexpr,
    X_DT_ROW: tl.constexpr,
    DECAY_ROW: tl.constexpr,
    B_ROW: tl.constexpr,
    X_ROW: tl.constexpr,
    DT_ROW: tl.constexpr,
    NEW_B_ROW: tl.constexpr,
    C_ROW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Replay the ring on BLOCK_P rows of the state of one head, advance them by a token, and compute their y."""
    row = tl.program_id(1).to(tl.int64)
    blocks: tl.constexpr = (WIDTH + BLOCK_P - 1) // BLOCK_P
    head, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    group = head // (HEADS // GROUPS)
    p, n = block * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    has_p, has_n = p < WIDTH, n < SIZE
    inside = has_p[:, None] & has_n[None, :]
    slot = tl.load(slots_ptr + row).to(tl.int64)
    state_ptr = pool_ptr + slot * SLOT + (head * WIDTH + p)[:, None] * SIZE + n[None, :]
    state = tl.load(state_ptr, inside, other=0.0)

    position, place = tl.load(positions_ptr + row), tl.load(places_ptr + row).to(tl.int64)
    x = tl.load(x_ptr + row * X_ROW + head * WIDTH + p, has_p, other=0.0).to(tl.float32)
    B = tl.load(new_B_ptr + row * NEW_B_ROW + group * SIZE + n, has_n, other=0.0).to(tl.float32)
    dt = tl.load(dt_ptr + row * DT_ROW + head).to(tl.float32)
    A, D = tl.load(A_ptr + head), tl.load(D_ptr + head)
    if dt_bias_ptr is not None:
        dt = clamp(softplus(dt + tl.load(dt_bias_ptr + head)), dt_low, dt_high)

    x_dt_ptr += place * X_DT_ROW + head * WIDTH
    decay_ptr += place * DECAY_ROW + head
    B_ptr += place * B_ROW + group * SIZE
    end = (position % WINDOW).to(tl.int32)
    begin = _begin(position, end, tl.load(starts_ptr + row))
    state = _replayed(state, begin, end, x_dt_ptr + p, decay_ptr, B_ptr + n, has_p, has_n, HEADS, WIDTH, GROUPS, SIZE)
    # Load C after the loop, because during the loop it would occupy registers.
    C = tl.load(C_ptr + row * C_ROW + group * SIZE + n, has_n, other=0.0).to(tl.float32)
    decay, x_dt = tl.exp(dt * A), x * dt
    state = advanced(state, decay, x_dt, B)
    y = tl.sum(state * C[None, :], 1) + D * x
    tl.store(y_ptr + (row * HEADS + head) * WIDTH + p, y, has_p)

    if end == WINDOW - 1:
        tl.store(state_ptr, state, inside)
    else:  # Add the inputs to the ring. Several programs share decay and B: only one of them writes.
        is_first = block == 0
        is_first_of_group = is_first & (head % (HEADS // GROUPS) == 0)
        tl.store(x_dt_ptr + end * (HEADS * WIDTH) + p, x_dt, has_p)
        tl.store(decay_ptr + end * HEADS, decay, is_first)
        tl.store(B_ptr + end * (GROUPS * SIZE) + n, B, has_n & is_first_of_group)


@jit
def _flush(
    pool_ptr,
    x_dt_ptr,
    decay_ptr,
    B_ptr,
    slots_ptr,
    targets_ptr,
    positions_ptr,
    places_ptr,
    starts_ptr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    WINDOW: tl.constexpr,
    SLOT: tl.constexpr,
    X_DT_ROW: tl.constexpr,
    DECAY_ROW: tl.constexpr,
    B_ROW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Replay the ring on BLOCK_P rows of the state of one head, and write them to the row's target."""
    row = tl.program_id(1).to(tl.int64)
    blocks: tl.constexpr = (WIDTH + BLOCK_P - 1) // BLOCK_P
    head = tl.program_id(0) // blocks
    group = head // (HEADS // GROUPS)
    p, n = tl.program_id(0) % blocks * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    has_p, has_n = p < WIDTH, n < SIZE
    inside = has_p[:, None] & has_n[None, :]
    in_slot = (head * WIDTH + p)[:, None] * SIZE + n[None, :]
    state = tl.load(pool_ptr + tl.load(slots_ptr + row).to(tl.int64) * SLOT + in_slot, inside, other=0.0)

    position, place = tl.load(positions_ptr + row), tl.load(places_ptr + row).to(tl.int64)
    x_dt_ptr += place * X_DT_ROW + head * WIDTH
    decay_ptr += place * DECAY_ROW + head
    B_ptr += place * B_ROW + group * SIZE
    end = (position % WINDOW).to(tl.int32)
    begin = _begin(position, end, tl.load(starts_ptr + row))
    state = _replayed(state, begin, end, x_dt_ptr + p, decay_ptr, B_ptr + n, has_p, has_n, HEADS, WIDTH, GROUPS, SIZE)
    tl.store(pool_ptr + tl.load(targets_ptr + row).to(tl.int64) * SLOT + in_slot, state, inside)


@jit
def _begin(position, end, start):
    """Return the ring index of the first input to replay; the last input is at `end` - 1. See replay.written_at."""
    return tl.maximum(start - (position - end), 0).to(tl.int32)


@jit
def _replayed(
    state,
    begin,
    end,
    x_dt_ptr,
    decay_ptr,
    B_ptr,
    has_p,
    has_n,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Return the state after the ring's inputs [begin, end).

    x_dt_ptr, decay_ptr, B_ptr: the head's (or its group's) part of the row's ring, at index 0.
    """
    for at in range(begin, end):
        x_dt = tl.load(x_dt_ptr + at * (HEADS * WIDTH), has_p, other=0.0)
        B = tl.load(B_ptr + at * (GROUPS * SIZE), has_n, other=0.0)
        state = advanced(state, tl.load(decay_ptr + at * HEADS), x_dt, B)
    return state
