"""The operation of reference.py in Triton, in two kernels.

The first computes everything of a chunk that needs no state: decays, and C·B of each group. The second passes through a
segment's chunks with the state in registers, so that only states of checkpoints and ends are written to memory.
"""

from math import inf

import torch
from torch import Tensor
from triton import language as tl

from baton.kernels.prefill.chunk_table import LONGEST, ChunkTable
from baton.kernels.runtime.triton import KernelConfig, by_shape, config_of, launch
from baton.kernels.runtime.triton.functions import clamp, softplus
from baton.kernels.runtime.triton.jit import jit
from baton.kernels.runtime.triton.layout import row_stride
from baton.kernels.runtime.triton.limits import shared_memory
from baton.kernels.runtime.triton.sizes import cdiv, next_power_of_2


def ssd_prefill(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    pool: Tensor,
    table: ChunkTable,
    *,
    dt_bias: Tensor | None = None,
    dt_limits: tuple[float, float] = (0.0, inf),
) -> Tensor:
    """Compute reference.ssd_prefill. x, dt, B, C and the pool may be strided in their first dimension.

    x, B and C have one dtype, float32 or bfloat16, which is also the dtype of y and of the operands of all products;
    sums and states are float32.

    dt_bias: float32 [H] or None; with it, dt becomes softplus(dt + dt_bias), clamped to dt_limits.
    """
    (tokens, heads, width), (groups, size) = x.shape, B.shape[1:]
    device = x.device
    decays = torch.empty(table.chunks, heads, 2, LONGEST, device=device)
    scores = torch.empty(table.chunks, groups, LONGEST, LONGEST, device=device)
    y = torch.empty(tokens, heads, width, dtype=x.dtype, device=device)
    sizes = {
        "HEADS": heads,
        "SIZE": size,
        "HEADS_PER_GROUP": heads // groups,
        "B_ROW": row_stride(B),
        "C_ROW": row_stride(C),
        "TOKENS": LONGEST,
    }
    config = _prepare_config(heads // groups, size, x.dtype, device)
    launch(
        _prepare,
        (groups * table.chunks, cdiv(heads // groups, config.blocks["BLOCK_H"])),
        *(dt, A, B, C, dt_bias, decays, scores, table.starts, *dt_limits),
        config=config,
        DT_ROW=row_stride(dt),
        **sizes,
    )
    config = _scan_config(heads, width, size, x.dtype, device, shared_memory(device))
    launch(
        _scan,
        (heads * cdiv(width, config.blocks["BLOCK_P"]), table.segments),
        *(x, B, C, D, decays, scores, y, pool),
        *(table.slots, table.first, table.starts, table.saves, table.saved),
        config=config,
        WIDTH=width,
        X_ROW=row_stride(x),
        SLOT=row_stride(pool),
        BLOCK_N=max(16, next_power_of_2(size)),
        **sizes,
    )
    return y


@by_shape
def _prepare_config(heads_per_group: int, size: int, dtype: torch.dtype, device: torch.device) -> KernelConfig:
    shape = f"heads={heads_per_group} state={size} {str(dtype).removeprefix('torch.')}"
    return config_of("mamba2.ssd.prepare", shape, device, *prepare_candidates(heads_per_group))


def prepare_candidates(heads_per_group: int) -> list[KernelConfig]:
    """Return the configurations of _prepare to choose from, the default first."""
    most = next_power_of_2(heads_per_group)
    chosen = [(16, 32, 4), (32, 32, 4), (16, 64, 4), (16, 16, 4), (16, 32, 8), (8, 32, 4)]
    return [KernelConfig({"BLOCK_H": min(heads, most), "BLOCK_N": size}, warps) for heads, size, warps in chosen]


@by_shape
def _scan_config(
    heads: int, width: int, size: int, dtype: torch.dtype, device: torch.device, shared: int
) -> KernelConfig:
    shape = f"heads={heads} width={width} state={size} {str(dtype).removeprefix('torch.')}"
    return config_of("mamba2.ssd.scan", shape, device, *scan_candidates(heads, width, size, dtype, shared))


def scan_candidates(heads: int, width: int, size: int, dtype: torch.dtype, shared: int) -> list[KernelConfig]:
    """Return the configurations of _scan to choose from, the default first.

    Every program of a head reads B and C, so the default has as few programs per head as keep a GPU busy with one
    segment. Three pipeline stages let loads overlap with the previous chunk, if there is enough shared memory.
    Float32 has no tensor cores, and the operands of larger blocks would not fit into registers.

    shared: bytes of shared memory that a program may use.
    """
    most = max(16, next_power_of_2(width))
    block = next((block for block in (64, 32) if heads * cdiv(width, block) >= 64), 16)
    if dtype == torch.float32:
        chosen = [(16, 8, 1), (16, 16, 1), (32, 16, 1), (16, 4, 1)]
    elif size > 128:
        chosen = [(min(block, 32), 8, 1), (16, 4, 1), (16, 8, 1), (32, 4, 1), (32, 8, 2)]
    else:
        stages = 3 if shared >= 163 * 1024 else 2
        others = [(64, 8, 1), (64, 8, 2), (64, 4, 3), (64, 8, 3), (32, 4, 2), (32, 4, 3), (32, 8, 3), (16, 4, 3)]
        chosen = [(block, 4 if block == 16 else 8, stages), *others]
    return [KernelConfig({"BLOCK_P": min(block, most)}, warps, stages) for block, warps, stages in chosen]


@jit
def _prepare(
    dt_ptr,
    A_ptr,
    B_ptr,
    C_ptr,
    dt_bias_ptr,
    decays_ptr,
    scores_ptr,
    starts_ptr,
    dt_low,
    dt_high,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    DT_ROW: tl.constexpr,
    B_ROW: tl.constexpr,
    C_ROW: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute the sums of dt·A up to each token, and dt, for BLOCK_H heads of a group in one chunk.

    The program of a group's first heads also computes the group's scores[i, j] = C_i·B_j. After a chunk's end dt is 0,
    so the sums stay as they are at its end: nothing decays there, and nothing is added.
    """
    GROUPS: tl.constexpr = HEADS // HEADS_PER_GROUP
    chunk, group, block = (tl.program_id(0) // GROUPS).to(tl.int64), tl.program_id(0) % GROUPS, tl.program_id(1)
    token = tl.arange(0, TOKENS)
    begin = tl.load(starts_ptr + chunk).to(tl.int64)
    live = token < (tl.load(starts_ptr + chunk + 1) - begin).to(tl.int32)

    member = block * BLOCK_H + tl.arange(0, BLOCK_H)
    inside, head = member < HEADS_PER_GROUP, group * HEADS_PER_GROUP + member
    is_input = inside[:, None] & live[None, :]
    dt_places = token[None, :] * DT_ROW + head[:, None]
    dt = tl.load(dt_ptr + begin * DT_ROW + dt_places, is_input, other=0.0).to(tl.float32)
    if dt_bias_ptr is not None:
        dt = clamp(softplus(dt + tl.load(dt_bias_ptr + head, inside, other=0.0)[:, None]), dt_low, dt_high)
    dt = tl.where(is_input, dt, 0.0)  # Mask again, because softplus(bias) is not 0.
    decays_ptr += chunk * (HEADS * 2 * TOKENS)
    places = head[:, None] * (2 * TOKENS) + token[None, :]
    sums = tl.cumsum(dt * tl.load(A_ptr + head, inside, other=0.0)[:, None], 1)
    tl.store(decays_ptr + places, sums, inside[:, None])
    tl.store(decays_ptr + TOKENS + places, dt, inside[:, None])

    if block == 0:
        C_ptr += begin * C_ROW + group * SIZE
        B_ptr += begin * B_ROW + group * SIZE
        scores = tl.zeros([TOKENS, TOKENS], tl.float32)
        for part in range(0, SIZE, BLOCK_N):
            n = part + tl.arange(0, BLOCK_N)
            in_C, in_B = live[:, None] & (n < SIZE)[None, :], live[None, :] & (n < SIZE)[:, None]
            C = tl.load(C_ptr + (token[:, None] * C_ROW + n[None, :]), in_C, other=0.0)
            B = tl.load(B_ptr + (token[None, :] * B_ROW + n[:, None]), in_B, other=0.0)
            scores = tl.dot(C, B, scores, input_precision="ieee")
        scores_ptr += (chunk * GROUPS + group) * (TOKENS * TOKENS)
        tl.store(scores_ptr + (token[:, None] * TOKENS + token[None, :]), scores)


@jit
def _scan(
    x_ptr,
    B_ptr,
    C_ptr,
    D_ptr,
    decays_ptr,
    scores_ptr,
    y_ptr,
    pool_ptr,
    slots_ptr,
    first_ptr,
    starts_ptr,
    saves_ptr,
    saved_ptr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    X_ROW: tl.constexpr,
    B_ROW: tl.constexpr,
    C_ROW: tl.constexpr,
    SLOT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Scan BLOCK_P columns of one head of one segment. The state is held transposed: [SIZE, WIDTH]."""
    BLOCKS: tl.constexpr = (WIDTH + BLOCK_P - 1) // BLOCK_P
    GROUPS: tl.constexpr = HEADS // HEADS_PER_GROUP
    Y_ROW: tl.constexpr = HEADS * WIDTH
    head, segment = tl.program_id(0) // BLOCKS, tl.program_id(1)
    group = head // HEADS_PER_GROUP
    p, n = (tl.program_id(0) % BLOCKS) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    token = tl.arange(0, TOKENS)
    D = tl.load(D_ptr + head)
    x_ptr, y_ptr, pool_ptr = x_ptr + head * WIDTH, y_ptr + head * WIDTH, pool_ptr + head * (WIDTH * SIZE)
    B_ptr, C_ptr, scores_ptr = B_ptr + group * SIZE, C_ptr + group * SIZE, scores_ptr + group * (TOKENS * TOKENS)
    decays_ptr += head * (2 * TOKENS)

    own_ptr = pool_ptr + tl.load(slots_ptr + segment).to(tl.int64) * SLOT
    in_state = (n < SIZE)[:, None] & (p < WIDTH)[None, :]
    state = tl.load(own_ptr + (p[None, :] * SIZE + n[:, None]), in_state, other=0.0).to(tl.float32)
    first, stop = tl.load(first_ptr + segment).to(tl.int64), tl.load(first_ptr + segment + 1).to(tl.int64)
    begin, end = tl.load(starts_ptr + first).to(tl.int64), tl.load(starts_ptr + first + 1).to(tl.int64)
    for chunk in range(first, stop):
        # Load the next chunk's bounds now, so that the next chunk's loads need not wait for them.
        next_begin = tl.load(starts_ptr + chunk + 1).to(tl.int64)
        next_end = tl.load(starts_ptr + tl.minimum(chunk + 2, stop)).to(tl.int64)
        live = token < (end - begin).to(tl.int32)
        in_x = live[:, None] & (p < WIDTH)[None, :]
        C_places, in_C = token[:, None] * C_ROW + n[None, :], live[:, None] & (n < SIZE)[None, :]
        C = tl.load(C_ptr + begin * C_ROW + C_places, in_C, other=0.0)
        x = tl.load(x_ptr + begin * X_ROW + (token[:, None] * X_ROW + p[None, :]), in_x, other=0.0)
        a = tl.load(decays_ptr + chunk * (HEADS * 2 * TOKENS) + token)
        dt = tl.load(decays_ptr + chunk * (HEADS * 2 * TOKENS) + TOKENS + token)
        total = tl.load(decays_ptr + chunk * (HEADS * 2 * TOKENS) + TOKENS - 1)
        chunk_scores_ptr = scores_ptr + chunk * (GROUPS * TOKENS * TOKENS)
        scores = tl.load(chunk_scores_ptr + (token[:, None] * TOKENS + token[None, :]))

        # y = C·(state before the chunk) + C·(inputs of the chunk up to each token) + D·x.
        is_causal = token[:, None] >= token[None, :]
        within = scores * tl.exp(tl.where(is_causal, a[:, None] - a[None, :], -float("inf"))) * dt[None, :]
        y = tl.dot(C, state.to(C.dtype), input_precision="ieee") * tl.exp(a)[:, None]
        y = tl.dot(within.to(x.dtype), x, y, input_precision="ieee") + x.to(tl.float32) * D
        tl.store(y_ptr + begin * Y_ROW + (token[:, None] * Y_ROW + p[None, :]), y.to(x.dtype), in_x)

        # Compute the state at the chunk's end, and write it to the slots of checkpoints there.
        B_places, in_B = token[None, :] * B_ROW + n[:, None], live[None, :] & (n < SIZE)[:, None]
        B = tl.load(B_ptr + begin * B_ROW + B_places, in_B, other=0.0)
        added = (x.to(tl.float32) * (tl.exp(total - a) * dt)[:, None]).to(x.dtype)
        state = tl.dot(B, added, state * tl.exp(total), input_precision="ieee")
        begin, end = next_begin, next_end
        save, saved = tl.load(saves_ptr + chunk).to(tl.int32), tl.load(saves_ptr + chunk + 1).to(tl.int32)
        if save < saved:
            for number in range(save, saved):
                slot_ptr = pool_ptr + tl.load(saved_ptr + number).to(tl.int64) * SLOT
                tl.store(slot_ptr + (p[None, :] * SIZE + n[:, None]), state.to(pool_ptr.dtype.element_ty), in_state)
    tl.store(own_ptr + (p[None, :] * SIZE + n[:, None]), state.to(pool_ptr.dtype.element_ty), in_state)
