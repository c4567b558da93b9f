"""The update of reference.py in Triton. Each state is read once and written once."""

import torch
from torch import Tensor
from triton import language as tl

from baton.kernels.runtime.triton import KernelConfig, by_shape, config_of, launch
from baton.kernels.runtime.triton.functions import sigmoid, softplus
from baton.kernels.runtime.triton.jit import jit
from baton.kernels.runtime.triton.layout import row_stride
from baton.kernels.runtime.triton.sizes import cdiv, next_power_of_2
from baton.kernels.state_pool.triton_states import candidates, rounded, widened


def delta_update(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    pool: Tensor,
    slots: Tensor,
    positions: Tensor,
    *,
    targets: Tensor | None = None,
    A: Tensor | None = None,
    dt_bias: Tensor | None = None,
    beta_scale: float = 1.0,
    lower_bound: float | None = None,
) -> Tensor:
    """Compute reference.delta_update. q, k, v, g and beta may be float32 or bfloat16.

    These tensors and the pool may be strided in their first dimension. Padding rows may share a slot and a target,
    because neither the slots' contents nor the padding rows of o are used.

    targets: int64 [R], the slots that the states are written to, none of them another row's slot; None: `slots`.
    A: float32 [Hv], or None if the inputs are prepared as in the reference. With A, the kernels prepare the projected
        and convolved inputs: q and k are normalised to unit length and q is scaled by Dk^-½, g becomes
        log_decays(g + dt_bias, A, lower_bound), and beta becomes beta_scale·σ(beta).
    dt_bias: float32 [Hv], or [Hv·Dk] with one decay per channel; given together with A.
    """
    (rows, heads, width), (key_heads, size) = v.shape, k.shape[1:]
    o = torch.empty(rows, heads, width, dtype=torch.float32, device=v.device)
    is_rounded = pool.dtype == torch.bfloat16
    by_channel = g.dim() == 3
    config = step_config(by_channel, width, size, pool.dtype, v.device)
    launch(
        _step,
        (heads * cdiv(width, config.blocks["BLOCK_P"]), rows),
        *(q, k, v, g, beta, A, dt_bias, pool.view(torch.int16) if is_rounded else pool),
        *(slots, targets, positions, o, size**-0.5, beta_scale, lower_bound),
        config=config,
        HEADS=heads,
        WIDTH=width,
        SIZE=size,
        HEADS_PER_KEY=heads // key_heads,
        BY_CHANNEL=by_channel,
        Q_ROW=row_stride(q),
        K_ROW=row_stride(k),
        V_ROW=row_stride(v),
        G_ROW=row_stride(g),
        BETA_ROW=row_stride(beta),
        SLOT=row_stride(pool),
        BLOCK_N=next_power_of_2(size),
    )
    return o


@by_shape
def step_config(by_channel: bool, width: int, size: int, states: torch.dtype, device: torch.device) -> KernelConfig:
    """Return the configuration of every kernel that advances states by single tokens.

    The order of a sum depends on it, so kernels that give the same bits share it.
    """
    kernel = f"delta_net.rule.{'channel_' * by_channel}step"
    shape = f"width={width} state={size} {str(states).removeprefix('torch.')}"
    return config_of(kernel, shape, device, *candidates(size))


@jit
def _step(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    A_ptr,
    dt_bias_ptr,
    pool_ptr,
    slots_ptr,
    targets_ptr,
    positions_ptr,
    o_ptr,
    scale,
    beta_scale,
    lower_bound,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    Q_ROW: tl.constexpr,
    K_ROW: tl.constexpr,
    V_ROW: tl.constexpr,
    G_ROW: tl.constexpr,
    BETA_ROW: tl.constexpr,
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
    key_places = head // HEADS_PER_KEY * SIZE + n
    q = tl.load(q_ptr + row * Q_ROW + key_places, has_n, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + row * K_ROW + key_places, has_n, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + row * V_ROW + head * WIDTH + p, has_p, other=0.0).to(tl.float32)
    # The decay is one number per channel, else one per head.
    if BY_CHANNEL:
        g = tl.load(g_ptr + row * G_ROW + head * SIZE + n, has_n, other=0.0).to(tl.float32)
    else:
        g = tl.load(g_ptr + row * G_ROW + head).to(tl.float32)
    beta = tl.load(beta_ptr + row * BETA_ROW + head).to(tl.float32)
    position = tl.load(positions_ptr + row)
    if targets_ptr is not None:
        slot = tl.load(targets_ptr + row).to(tl.int64)

    if A_ptr is not None:
        if BY_CHANNEL:
            dt_bias = tl.load(dt_bias_ptr + head * SIZE + n, has_n, other=0.0)
        else:
            dt_bias = tl.load(dt_bias_ptr + head)
        A = tl.load(A_ptr + head)
        q, k, g, beta = prepared(q, k, g, beta, A, dt_bias, scale, beta_scale, lower_bound)
    state, o = stepped(widened(loaded), q, k, v, g, beta, BY_CHANNEL)
    tl.store(o_ptr + (row * HEADS + head) * WIDTH + p, o, has_p)
    if pool_ptr.dtype.element_ty == tl.int16:
        tl.store(pool_ptr + slot * SLOT + places, rounded(state, places, position), inside)
    else:
        tl.store(pool_ptr + slot * SLOT + places, state, inside)


@jit
def prepared(q, k, g, beta, A, dt_bias, scale, beta_scale, lower_bound):
    """Return q, k, g and beta as the rule takes them, see `A` of delta_update."""
    q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * scale
    k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
    return q, k, log_decays(g + dt_bias, A, lower_bound), beta_scale * tl.sigmoid(beta)


@jit
def log_decays(x, A, lower_bound):
    """Return what reference.log_decays does."""
    return A * softplus(x) if lower_bound is None else lower_bound * sigmoid(-A * x)


@jit
def stepped(state, q, k, v, g, beta, BY_CHANNEL: tl.constexpr):
    """Return the state after a token, and the token's output.

    The multiply-add is fused explicitly, so that every kernel that calls this rounds alike.
    """
    state *= tl.exp(g)[None, :] if BY_CHANNEL else tl.exp(g)
    change = beta * (v - tl.sum(state * k[None, :], 1))
    state = tl.fma(change[:, None], k[None, :], state)
    return state, tl.sum(state * q[None, :], 1)
