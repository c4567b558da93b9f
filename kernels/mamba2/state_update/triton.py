"""The operation of reference.py in Triton. Each state is read once and written once."""

from math import inf

import torch
from torch import Tensor
from triton import language as tl

from baton.kernels.runtime.triton import KernelConfig, by_shape, config_of, launch
from baton.kernels.runtime.triton.functions import clamp, softplus
from baton.kernels.runtime.triton.jit import jit
from baton.kernels.runtime.triton.layout import row_stride
from baton.kernels.runtime.triton.sizes import cdiv, next_power_of_2
from baton.kernels.state_pool.triton_states import candidates, rounded, widened


def selective_state_update(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    pool: Tensor,
    slots: Tensor,
    positions: Tensor,
    *,
    targets: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_limits: tuple[float, float] = (0.0, inf),
) -> Tensor:
    """Compute reference.selective_state_update. x, dt, B and C may be float32 or bfloat16.

    These tensors and the pool may be strided in their first dimension. Padding rows may share a slot and a target,
    because neither the slots' contents nor the padding rows of y are used.

    targets: int64 [R], the slots that the states are written to, none of them another row's slot; None: `slots`.
    dt_bias: float32 [H] or None; with it, dt becomes softplus(dt + dt_bias), clamped to dt_limits.
    """
    (rows, heads, width), (groups, size) = x.shape, B.shape[1:]
    y = torch.empty(rows, heads, width, dtype=torch.float32, device=x.device)
    is_rounded = pool.dtype == torch.bfloat16
    config = step_config(width, size, pool.dtype, x.device)
    launch(
        _step,
        (heads * cdiv(width, config.blocks["BLOCK_P"]), rows),
        *(x, dt, A, B, C, D, dt_bias, pool.view(torch.int16) if is_rounded else pool),
        *(slots, targets, positions, y, *dt_limits),
        config=config,
        HEADS=heads,
        WIDTH=width,
        SIZE=size,
        HEADS_PER_GROUP=heads // groups,
        X_ROW=row_stride(x),
        DT_ROW=row_stride(dt),
        B_ROW=row_stride(B),
        C_ROW=row_stride(C),
        SLOT=row_stride(pool),
        BLOCK_N=next_power_of_2(size),
    )
    return y


@by_shape
def step_config(width: int, size: int, states: torch.dtype, device: torch.device) -> KernelConfig:
    """Return the configuration of every kernel that advances states by single tokens.

    The order of a sum depends on it, so kernels that give the same bits share it.
    """
    shape = f"width={width} state={size} {str(states).removeprefix('torch.')}"
    return config_of("mamba2.state_update.step", shape, device, *candidates(size))


@jit
def _step(
    x_ptr,
    dt_ptr,
    A_ptr,
    B_ptr,
    C_ptr,
    D_ptr,
    dt_bias_ptr,
    pool_ptr,
    slots_ptr,
    targets_ptr,
    positions_ptr,
    y_ptr,
    dt_low,
    dt_high,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    X_ROW: tl.constexpr,
    DT_ROW: tl.constexpr,
    B_ROW: tl.constexpr,
    C_ROW: tl.constexpr,
    SLOT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Advance BLOCK_P rows of the state of one head. pool_ptr: float32, or the bits of bfloat16 as int16."""
    row = tl.program_id(1).to(tl.int64)
    blocks: tl.constexpr = (WIDTH + BLOCK_P - 1) // BLOCK_P
    head = tl.program_id(0) // blocks
    p = tl.program_id(0) % blocks * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    has_p, has_n = p < WIDTH, n < SIZE
    inside = has_p[:, None] & has_n[None, :]
    places = (head * WIDTH + p)[:, None] * SIZE + n[None, :]

    slot = tl.load(slots_ptr + row).to(tl.int64)
    loaded = tl.load(pool_ptr + slot * SLOT + places, inside, other=0)
    x = tl.load(x_ptr + row * X_ROW + head * WIDTH + p, has_p, other=0.0).to(tl.float32)
    group_places = head // HEADS_PER_GROUP * SIZE + n
    B = tl.load(B_ptr + row * B_ROW + group_places, has_n, other=0.0).to(tl.float32)
    C = tl.load(C_ptr + row * C_ROW + group_places, has_n, other=0.0).to(tl.float32)
    dt = tl.load(dt_ptr + row * DT_ROW + head).to(tl.float32)
    A, D, position = tl.load(A_ptr + head), tl.load(D_ptr + head), tl.load(positions_ptr + row)
    if targets_ptr is not None:
        slot = tl.load(targets_ptr + row).to(tl.int64)
    if dt_bias_ptr is not None:
        dt = clamp(softplus(dt + tl.load(dt_bias_ptr + head)), dt_low, dt_high)

    state, y = stepped(widened(loaded), x, dt, A, B, C, D)
    tl.store(y_ptr + (row * HEADS + head) * WIDTH + p, y, has_p)
    if pool_ptr.dtype.element_ty == tl.int16:
        tl.store(pool_ptr + slot * SLOT + places, rounded(state, places, position), inside)
    else:
        tl.store(pool_ptr + slot * SLOT + places, state, inside)


@jit
def stepped(state, x, dt, A, B, C, D):
    """Return the state after a token, and the token's y."""
    state = advanced(state, tl.exp(dt * A), x * dt, B)
    return state, tl.sum(state * C[None, :], 1) + D * x


@jit
def advanced(state, decay, x_dt, B):
    """Return the state after one step of the recurrence.

    The multiply-add is fused explicitly, so that every kernel that calls this rounds alike.
    """
    return tl.fma(x_dt[:, None], B[None, :], state * decay)
