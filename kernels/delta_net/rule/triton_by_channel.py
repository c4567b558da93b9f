"""The scan with one decay per channel in Triton, in three kernels.

The first multiplies a chunk's keys and queries with their channels' decays. The second relates the chunk's tokens: it
computes scores, and the inverse of the triangular system that couples the tokens. The third passes through a segment's
chunks with the state in registers, as triton_by_head.py does.

The decay from token j to token i is never computed as a quotient of two decays, because a decay may be 0. It is a
product of two decays, from j to a border between the two and from there to i, both at most 1. For each power of two h,
adjacent blocks of h tokens form pairs with a border in the middle, and one matrix product relates the tokens of all
earlier blocks to those of the later ones. Any two tokens of a chunk are in the two blocks of a pair for exactly one h.
"""

import torch
from torch import Tensor
from triton import language as tl

from baton.kernels.delta_net.rule.triton_by_head import inverse_of, scan_candidates
from baton.kernels.delta_net.rule.triton_update import log_decays
from baton.kernels.prefill.chunk_table import LONGEST, ChunkTable
from baton.kernels.runtime.triton import KernelConfig, by_shape, config_of, launch
from baton.kernels.runtime.triton.jit import jit
from baton.kernels.runtime.triton.layout import row_stride
from baton.kernels.runtime.triton.limits import shared_memory
from baton.kernels.runtime.triton.sizes import cdiv, next_power_of_2

LOG2_E = tl.constexpr(1.4426950408889634)


def delta_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    pool: Tensor,
    table: ChunkTable,
    *,
    A: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
) -> Tensor:
    """Compute reference.delta_scan with one decay per channel. All inputs and the pool may be strided in dimension 0.

    q, k and v have one dtype, float32 or bfloat16, which is also the dtype of o and of the operands of all products; g
    and beta may be float32 or bfloat16. Sums and states are float32.

    A: float32 [H], or None if the inputs are prepared as in the reference. With A, the kernels prepare the projected
        and convolved inputs: q and k are normalised to unit length and q is scaled by Dk^-½, g becomes
        log_decays(g + dt_bias, A, lower_bound), and beta becomes σ(beta).
    dt_bias: float32 [H·Dk], given together with A.
    """
    (tokens, heads, width), size = v.shape, k.shape[2]
    device = v.device
    # recall_keys and read_queries are multiplied with the state before a chunk, so they contain the decays from the
    # chunk's first token to each token. add_keys add to the state after the chunk, so they contain the decays from each
    # token to its end.
    per_channel = (table.chunks, heads, LONGEST, size)
    recall_keys, read_queries, add_keys = (torch.empty(per_channel, dtype=v.dtype, device=device) for _ in range(3))
    sums = torch.empty(per_channel, device=device)  # log2 of decays from a chunk's first token to each token
    inverses = torch.empty(table.chunks, heads, LONGEST, LONGEST, dtype=v.dtype, device=device)
    scores = torch.empty(table.chunks, heads, LONGEST, LONGEST, dtype=v.dtype, device=device)
    o = torch.empty(tokens, heads, width, dtype=v.dtype, device=device)
    padded_size = max(16, next_power_of_2(size))
    sizes = {"HEADS": heads, "SIZE": size, "TOKENS": LONGEST}
    rows = {"Q_ROW": row_stride(q), "K_ROW": row_stride(k)}
    launch(
        _decay,
        (heads * table.chunks,),
        *(q, k, g, A, dt_bias, recall_keys, read_queries, add_keys, sums, table.starts, size**-0.5, lower_bound),
        config=_decay_config(size, v.dtype, device),
        G_ROW=row_stride(g),
        **rows,
        **sizes,
    )
    launch(
        _relate,
        (heads * table.chunks,),
        *(q, k, beta, sums, inverses, scores, table.starts, size**-0.5),
        config=_relate_config(size, v.dtype, device, shared_memory(device)),
        IS_PROJECTED=A is not None,
        BETA_ROW=row_stride(beta),
        IS_EXACT=v.dtype == torch.float32,
        **rows,
        **sizes,
    )
    config = _scan_config(heads, width, size, v.dtype, device, shared_memory(device))
    launch(
        _scan,
        (heads * cdiv(width, config.blocks["BLOCK_P"]), table.segments),
        *(recall_keys, read_queries, add_keys, sums, v, inverses, scores, o, pool),
        *(table.slots, table.first, table.starts, table.saves, table.saved),
        config=config,
        WIDTH=width,
        V_ROW=row_stride(v),
        SLOT=row_stride(pool),
        BLOCK_N=padded_size,
        **sizes,
    )
    return o


@by_shape
def _decay_config(size: int, dtype: torch.dtype, device: torch.device) -> KernelConfig:
    shape = f"state={size} {str(dtype).removeprefix('torch.')}"
    return config_of("delta_net.rule.channel_decay", shape, device, *decay_candidates(size))


@by_shape
def _relate_config(size: int, dtype: torch.dtype, device: torch.device, shared: int) -> KernelConfig:
    shape = f"state={size} {str(dtype).removeprefix('torch.')}"
    return config_of("delta_net.rule.channel_relate", shape, device, *relate_candidates(size, dtype, shared))


@by_shape
def _scan_config(
    heads: int, width: int, size: int, dtype: torch.dtype, device: torch.device, shared: int
) -> KernelConfig:
    shape = f"heads={heads} width={width} state={size} {str(dtype).removeprefix('torch.')}"
    return config_of("delta_net.rule.channel_scan", shape, device, *scan_candidates(heads, width, size, dtype, shared))


def decay_candidates(size: int) -> list[KernelConfig]:
    """Return the configurations of _decay to choose from, the default first."""
    return _in_parts(size, [(32, 4), (64, 4), (64, 8), (128, 8)])


def relate_candidates(size: int, dtype: torch.dtype, shared: int) -> list[KernelConfig]:
    """Return the configurations of _relate to choose from, the default first.

    Where a group of four warps multiplies with operands in shared memory (Hopper and later), many channels at a time
    need fewer instructions. Elsewhere operands are in registers, and more channels do not fit.

    shared: bytes of shared memory that a program may use.
    """
    if dtype == torch.float32:
        chosen = [(16, 8), (32, 8), (16, 4)]
    elif shared >= 227 * 1024:
        chosen = [(128, 8), (128, 16), (64, 8), (64, 16), (32, 8), (32, 16)]
    else:
        chosen = [(16, 8), (16, 4), (32, 4), (32, 8)]
    return _in_parts(size, chosen)


def _in_parts(size: int, chosen: list[tuple[int, int]]) -> list[KernelConfig]:
    """Return configurations for kernels that pass over `size` channels in parts.

    chosen: pairs (channels per part, warps).
    """
    most = max(16, next_power_of_2(size))
    return [KernelConfig({"BLOCK_N": min(block, most)}, warps, 1) for block, warps in chosen]


@jit
def _decay(
    q_ptr,
    k_ptr,
    g_ptr,
    A_ptr,
    dt_bias_ptr,
    recall_keys_ptr,
    read_queries_ptr,
    add_keys_ptr,
    sums_ptr,
    starts_ptr,
    scale,
    lower_bound,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    Q_ROW: tl.constexpr,
    K_ROW: tl.constexpr,
    G_ROW: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute recall_keys, read_queries, add_keys and sums of one head in one chunk.

    Tokens past the chunk's end have decay 1.
    """
    chunk, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    token = tl.arange(0, TOKENS)
    begin = tl.load(starts_ptr + chunk).to(tl.int64)
    live = token < (tl.load(starts_ptr + chunk + 1) - begin).to(tl.int32)
    q_ptr += begin * Q_ROW + head * SIZE
    k_ptr += begin * K_ROW + head * SIZE
    g_ptr += begin * G_ROW + head * SIZE
    k_norm, q_norm = tl.full([TOKENS], 1.0, tl.float32), tl.full([TOKENS], 1.0, tl.float32)
    if A_ptr is not None:
        k_norm = tl.rsqrt(_squares(k_ptr, K_ROW, SIZE, token, live, BLOCK_N) + 1e-6)
        q_norm = tl.rsqrt(_squares(q_ptr, Q_ROW, SIZE, token, live, BLOCK_N) + 1e-6) * scale
    for part in range(0, SIZE, BLOCK_N):
        n = part + tl.arange(0, BLOCK_N)
        has_n = (n < SIZE)[None, :]
        inside = live[:, None] & has_n
        g = tl.load(g_ptr + (token[:, None] * G_ROW + n[None, :]), inside, other=0.0).to(tl.float32)
        if A_ptr is not None:
            bias = tl.load(dt_bias_ptr + head * SIZE + n, n < SIZE, other=0.0)
            g = tl.where(inside, log_decays(g + bias[None, :], tl.load(A_ptr + head), lower_bound), 0.0)
        sums = tl.cumsum(g * LOG2_E, 0)
        total = tl.sum(tl.where(token[:, None] == TOKENS - 1, sums, 0.0), 0)
        places = (chunk * HEADS + head) * (TOKENS * SIZE) + (token[:, None] * SIZE + n[None, :])
        tl.store(sums_ptr + places, sums, has_n)
        q = tl.load(q_ptr + (token[:, None] * Q_ROW + n[None, :]), inside, other=0.0).to(tl.float32) * q_norm[:, None]
        tl.store(read_queries_ptr + places, (q * tl.exp2(sums)).to(read_queries_ptr.dtype.element_ty), has_n)
        k = tl.load(k_ptr + (token[:, None] * K_ROW + n[None, :]), inside, other=0.0).to(tl.float32) * k_norm[:, None]
        tl.store(recall_keys_ptr + places, (k * tl.exp2(sums)).to(recall_keys_ptr.dtype.element_ty), has_n)
        tl.store(add_keys_ptr + places, (k * tl.exp2(total[None, :] - sums)).to(add_keys_ptr.dtype.element_ty), has_n)


@jit
def _squares(x_ptr, ROW: tl.constexpr, SIZE: tl.constexpr, token, live, BLOCK_N: tl.constexpr):
    """Return Σ x² of each token, [TOKENS]."""
    sums = tl.zeros([token.shape[0]], tl.float32)
    for part in range(0, SIZE, BLOCK_N):
        n = part + tl.arange(0, BLOCK_N)
        inside = live[:, None] & (n < SIZE)[None, :]
        x = tl.load(x_ptr + (token[:, None] * ROW + n[None, :]), inside, other=0.0).to(tl.float32)
        sums += tl.sum(x * x, 1)
    return sums


@jit
def _relate(
    q_ptr,
    k_ptr,
    beta_ptr,
    sums_ptr,
    inverses_ptr,
    scores_ptr,
    starts_ptr,
    scale,
    IS_PROJECTED: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    Q_ROW: tl.constexpr,
    K_ROW: tl.constexpr,
    BETA_ROW: tl.constexpr,
    TOKENS: tl.constexpr,
    IS_EXACT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute inverse and scores of one head in one chunk, with decays between tokens as the module describes.

    q and k stay as they are; if they are to be normalised, their products are multiplied with the inverse norms.
    """
    chunk, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    token = tl.arange(0, TOKENS)
    row, column = token[:, None], token[None, :]
    begin = tl.load(starts_ptr + chunk).to(tl.int64)
    count = (tl.load(starts_ptr + chunk + 1) - begin).to(tl.int32)
    live = token < count
    q_ptr += begin * Q_ROW + head * SIZE
    k_ptr += begin * K_ROW + head * SIZE
    sums_ptr += (chunk * HEADS + head) * (TOKENS * SIZE)

    key_scores, query_scores = tl.zeros([TOKENS, TOKENS], tl.float32), tl.zeros([TOKENS, TOKENS], tl.float32)
    k_squares, q_squares = tl.zeros([TOKENS], tl.float32), tl.zeros([TOKENS], tl.float32)
    for part in range(0, SIZE, BLOCK_N):
        n = part + tl.arange(0, BLOCK_N)
        has_n = (n < SIZE)[None, :]
        loaded_k = tl.load(k_ptr + (row * K_ROW + n[None, :]), live[:, None] & has_n, other=0.0)
        k = loaded_k.to(tl.float32)
        q = tl.load(q_ptr + (row * Q_ROW + n[None, :]), live[:, None] & has_n, other=0.0).to(tl.float32)
        sums = tl.load(sums_ptr + (row * SIZE + n[None, :]), has_n, other=0.0)
        k_squares += tl.sum(k * k, 1)
        q_squares += tl.sum(q * q, 1)
        # Each pass overwrites all scores between different blocks. A pass gets the scores between blocks of
        # different pairs wrong; later passes overwrite them. A token's score with itself contains no decay.
        part_of_keys = tl.zeros([TOKENS, TOKENS], tl.float32)
        part_of_queries = part_of_keys + tl.sum(q * k, 1)[:, None]
        half = 1
        decayed_k, decayed_q = _decayed(k, q, sums, sums_ptr, row, n, half, SIZE, TOKENS, loaded_k.dtype)
        while half < TOKENS:
            is_apart = (row ^ column) >= half
            of_keys = tl.dot(decayed_k, tl.trans(decayed_k), input_precision="ieee")
            of_queries = tl.dot(decayed_q, tl.trans(decayed_k), input_precision="ieee")
            half *= 2
            # Compute the next operands while tensor cores multiply. As values that the loop carries, they are computed
            # once and not in the layout of each operand.
            decayed_k, decayed_q = _decayed(k, q, sums, sums_ptr, row, n, half, SIZE, TOKENS, loaded_k.dtype)
            part_of_keys = tl.where(is_apart, of_keys, part_of_keys)
            part_of_queries = tl.where(is_apart, of_queries, part_of_queries)
        key_scores += part_of_keys
        query_scores += part_of_queries

    beta = tl.load(beta_ptr + begin * BETA_ROW + token * BETA_ROW + head, live, other=0.0).to(tl.float32)
    if IS_PROJECTED:
        beta = tl.where(live, tl.sigmoid(beta), 0.0)
        k_norm, q_norm = tl.rsqrt(k_squares + 1e-6), tl.rsqrt(q_squares + 1e-6) * scale
        key_scores *= k_norm[:, None] * k_norm[None, :]
        query_scores *= q_norm[:, None] * k_norm[None, :]
    matrix = (chunk * HEADS + head) * (TOKENS * TOKENS) + row * TOKENS + column
    query_scores = tl.where(row >= column, query_scores, 0.0)
    tl.store(scores_ptr + matrix, query_scores.to(scores_ptr.dtype.element_ty))
    key_scores = tl.where(row > column, key_scores * beta[:, None], 0.0)
    inverse = inverse_of(key_scores, row, column, TOKENS, IS_EXACT) * beta[None, :]
    tl.store(inverses_ptr + matrix, inverse.to(inverses_ptr.dtype.element_ty))


@jit
def _decayed(k, q, sums, sums_ptr, row, n, half, SIZE: tl.constexpr, TOKENS: tl.constexpr, dtype: tl.constexpr):
    """Return k and q times the decays between each token and the border in the middle of its pair of blocks.

    half: tokens of a block.
    """
    last = tl.minimum(row // (2 * half) * (2 * half) + half, TOKENS) - 1
    at_border = tl.load(sums_ptr + (last * SIZE + n[None, :]), (n < SIZE)[None, :], other=0.0)
    decay = tl.exp2(-tl.abs(sums - at_border))
    return (k * decay).to(dtype), (q * decay).to(dtype)


@jit
def _scan(
    recall_keys_ptr,
    read_queries_ptr,
    add_keys_ptr,
    sums_ptr,
    v_ptr,
    inverses_ptr,
    scores_ptr,
    o_ptr,
    pool_ptr,
    slots_ptr,
    first_ptr,
    starts_ptr,
    saves_ptr,
    saved_ptr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    V_ROW: tl.constexpr,
    SLOT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Compute BLOCK_P columns of one head for all chunks of a segment. The state is held transposed, [SIZE, WIDTH]."""
    BLOCKS: tl.constexpr = (WIDTH + BLOCK_P - 1) // BLOCK_P
    O_ROW: tl.constexpr = HEADS * WIDTH
    head, segment = tl.program_id(0) // BLOCKS, tl.program_id(1)
    p, n = (tl.program_id(0) % BLOCKS) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    token = tl.arange(0, TOKENS)
    v_ptr, o_ptr, pool_ptr = v_ptr + head * WIDTH, o_ptr + head * WIDTH, pool_ptr + head * (WIDTH * SIZE)
    matrix, has_n = token[:, None] * TOKENS + token[None, :], n < SIZE
    channels, transposed = token[:, None] * SIZE + n[None, :], token[None, :] * SIZE + n[:, None]

    own_ptr = pool_ptr + tl.load(slots_ptr + segment).to(tl.int64) * SLOT
    in_state = has_n[:, None] & (p < WIDTH)[None, :]
    state = tl.load(own_ptr + (p[None, :] * SIZE + n[:, None]), in_state, other=0.0).to(tl.float32)
    first, end_chunk = tl.load(first_ptr + segment).to(tl.int64), tl.load(first_ptr + segment + 1).to(tl.int64)
    for chunk in range(first, end_chunk):
        begin, end = tl.load(starts_ptr + chunk).to(tl.int64), tl.load(starts_ptr + chunk + 1).to(tl.int64)
        in_v = (token < (end - begin).to(tl.int32))[:, None] & (p < WIDTH)[None, :]
        chunk_place = (chunk * HEADS + head) * (TOKENS * SIZE)
        v = tl.load(v_ptr + begin * V_ROW + (token[:, None] * V_ROW + p[None, :]), in_v, other=0.0)
        rounded_state = state.to(v.dtype)
        keys = tl.load(recall_keys_ptr + chunk_place + channels, has_n[None, :], other=0.0)
        missing = v.to(tl.float32) - tl.dot(keys, rounded_state, input_precision="ieee")
        inverse = tl.load(inverses_ptr + (chunk * HEADS + head) * (TOKENS * TOKENS) + matrix)
        u = tl.dot(inverse, missing.to(v.dtype), input_precision="ieee")
        queries = tl.load(read_queries_ptr + chunk_place + channels, has_n[None, :], other=0.0)
        o = tl.dot(queries, rounded_state, input_precision="ieee")
        scores = tl.load(scores_ptr + (chunk * HEADS + head) * (TOKENS * TOKENS) + matrix)
        o = tl.dot(scores, u.to(v.dtype), o, input_precision="ieee")
        tl.store(o_ptr + begin * O_ROW + (token[:, None] * O_ROW + p[None, :]), o.to(v.dtype), in_v)

        added_keys = tl.load(add_keys_ptr + chunk_place + transposed, has_n[:, None], other=0.0)
        decay = tl.exp2(tl.load(sums_ptr + chunk_place + (TOKENS - 1) * SIZE + n[:, None], has_n[:, None], other=0.0))
        # Mask u again: as a separate value, it does not keep the copy of u above alive in shared memory, of which some
        # GPUs have too little.
        fed = tl.where(in_v, u, 0.0).to(v.dtype)
        state = tl.dot(added_keys, fed, state * decay, input_precision="ieee")
        save, saved = tl.load(saves_ptr + chunk).to(tl.int32), tl.load(saves_ptr + chunk + 1).to(tl.int32)
        if save < saved:
            for number in range(save, saved):
                save_ptr = pool_ptr + tl.load(saved_ptr + number).to(tl.int64) * SLOT
                tl.store(save_ptr + (p[None, :] * SIZE + n[:, None]), state.to(pool_ptr.dtype.element_ty), in_state)
    tl.store(own_ptr + (p[None, :] * SIZE + n[:, None]), state.to(pool_ptr.dtype.element_ty), in_state)
