"""The scan with one decay per head in Triton, in two kernels.

The first computes everything of a chunk that needs no state: decays, scores, and the inverse of the triangular system
that couples a chunk's tokens. The second passes through a segment's chunks with the state in registers, as
kernels/mamba2/ssd/triton.py does. Unlike flash-linear-attention's kernels, they never write transformed keys or values
to memory, so nothing as wide as a key passes between them.
"""

import torch
from torch import Tensor
from triton import language as tl

from baton.kernels.prefill.chunk_table import LONGEST, ChunkTable
from baton.kernels.runtime.triton import KernelConfig, by_shape, config_of, launch
from baton.kernels.runtime.triton.functions import softplus
from baton.kernels.runtime.triton.jit import jit
from baton.kernels.runtime.triton.layout import row_stride
from baton.kernels.runtime.triton.limits import shared_memory
from baton.kernels.runtime.triton.sizes import cdiv, next_power_of_2


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
    beta_scale: float = 1.0,
) -> Tensor:
    """Compute reference.delta_scan with one decay per head. All inputs and the pool may be strided in dimension 0.

    q, k and v have one dtype, float32 or bfloat16, which is also the dtype of o and of the operands of all products; g
    and beta may be float32 or bfloat16. Sums and states are float32.

    A: float32 [Hv], or None if the inputs are prepared as in the reference. With A, the kernels prepare the projected
        and convolved inputs: q and k are normalised to unit length and q is scaled by Dk^-½, g becomes A·softplus(g +
        dt_bias), and beta becomes beta_scale·σ(beta).
    dt_bias: float32 [Hv], given together with A.
    """
    (tokens, heads, width), (key_heads, size) = v.shape, k.shape[1:]
    device = v.device
    gates = torch.empty(table.chunks, heads, 4, LONGEST, device=device)
    inverses = torch.empty(table.chunks, heads, LONGEST, LONGEST, dtype=v.dtype, device=device)
    scores = torch.empty(table.chunks, heads, LONGEST, LONGEST, dtype=v.dtype, device=device)
    o = torch.empty(tokens, heads, width, dtype=v.dtype, device=device)
    sizes = {
        "HEADS": heads,
        "SIZE": size,
        "HEADS_PER_KEY": heads // key_heads,
        "Q_ROW": row_stride(q),
        "K_ROW": row_stride(k),
        "TOKENS": LONGEST,
    }
    launch(
        _prepare,
        (heads * table.chunks,),
        *(q, k, g, beta, A, dt_bias, gates, inverses, scores, table.starts, size**-0.5, beta_scale),
        config=_prepare_config(size, v.dtype, device),
        G_ROW=row_stride(g),
        BETA_ROW=row_stride(beta),
        IS_EXACT=v.dtype == torch.float32,
        **sizes,
    )
    config = _scan_config(heads, width, size, v.dtype, device, shared_memory(device))
    launch(
        _scan,
        (heads * cdiv(width, config.blocks["BLOCK_P"]), table.segments),
        *(q, k, v, gates, inverses, scores, o, pool),
        *(table.slots, table.first, table.starts, table.saves, table.saved),
        config=config,
        WIDTH=width,
        V_ROW=row_stride(v),
        SLOT=row_stride(pool),
        BLOCK_N=max(16, next_power_of_2(size)),
        **sizes,
    )
    return o


@by_shape
def _prepare_config(size: int, dtype: torch.dtype, device: torch.device) -> KernelConfig:
    shape = f"state={size} {str(dtype).removeprefix('torch.')}"
    return config_of("delta_net.rule.prepare", shape, device, *prepare_candidates(size, dtype))


def prepare_candidates(size: int, dtype: torch.dtype) -> list[KernelConfig]:
    """Return the configurations of _prepare to choose from, the default first."""
    chosen = [(32, 4), (64, 4), (32, 8), (64, 8), (128, 8)] if dtype != torch.float32 else [(16, 8), (32, 8)]
    most = max(16, next_power_of_2(size))
    return [KernelConfig({"BLOCK_N": min(block, most)}, warps, 1) for block, warps in chosen]


@by_shape
def _scan_config(
    heads: int, width: int, size: int, dtype: torch.dtype, device: torch.device, shared: int
) -> KernelConfig:
    shape = f"heads={heads} width={width} state={size} {str(dtype).removeprefix('torch.')}"
    return config_of("delta_net.rule.scan", shape, device, *scan_candidates(heads, width, size, dtype, shared))


def scan_candidates(heads: int, width: int, size: int, dtype: torch.dtype, shared: int) -> list[KernelConfig]:
    """Return the configurations of _scan to choose from, the default first.

    The default has enough programs to keep a GPU busy with one segment. Two pipeline stages let loads overlap with the
    previous chunk, if there is enough shared memory.
    Float32 has no tensor cores, and the operands of larger blocks would not fit into registers.

    shared: bytes of shared memory that a program may use.
    """
    most = max(16, next_power_of_2(width))
    block = 32 if heads * cdiv(width, 32) >= 64 else 16
    if dtype == torch.float32:
        chosen = [(16, 8, 1), (16, 4, 1)]
    elif size > 128:
        chosen = [(16, 8, 1), (32, 8, 1)]
    else:
        default = (block, 4, 2) if shared >= 163 * 1024 else (block, 8, 1)
        others = [(64, 8, 1), (64, 8, 2), (64, 4, 2), (32, 4, 1), (32, 4, 2), (32, 8, 2), (16, 4, 1), (16, 4, 2)]
        chosen = [default, *others]
    return [KernelConfig({"BLOCK_P": min(block, most)}, warps, stages) for block, warps, stages in chosen]


@jit
def _prepare(
    q_ptr,
    k_ptr,
    g_ptr,
    beta_ptr,
    A_ptr,
    dt_bias_ptr,
    gates_ptr,
    inverses_ptr,
    scores_ptr,
    starts_ptr,
    scale,
    beta_scale,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    Q_ROW: tl.constexpr,
    K_ROW: tl.constexpr,
    G_ROW: tl.constexpr,
    BETA_ROW: tl.constexpr,
    TOKENS: tl.constexpr,
    IS_EXACT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute gates, inverse and scores of one head in one chunk.

    q and k stay unnormalised; instead, the factors of their products contain the inverse norms.
    Tokens past the chunk's end have decay 1 and add nothing to the state.

    gates_ptr: [chunks, heads, 4, TOKENS]. With γ the running sum of g, γ_end its last value, and |k| and |q| the norms
        (for q divided by `scale`), the four rows are:
            exp(γ) / |k|, the factor of k·state
            exp(γ) / |q|, the factor of q·state
            exp(γ_end − γ) / |k|, the factor of each token's change when it is added to the state
            exp(γ), whose last number is the decay of the state over the chunk
    """
    chunk, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    token = tl.arange(0, TOKENS)
    row, column = token[:, None], token[None, :]
    begin = tl.load(starts_ptr + chunk).to(tl.int64)
    live = token < (tl.load(starts_ptr + chunk + 1) - begin).to(tl.int32)

    g = tl.load(g_ptr + begin * G_ROW + token * G_ROW + head, live, other=0.0).to(tl.float32)
    beta = tl.load(beta_ptr + begin * BETA_ROW + token * BETA_ROW + head, live, other=0.0).to(tl.float32)
    if A_ptr is not None:
        g = tl.where(live, tl.load(A_ptr + head) * softplus(g + tl.load(dt_bias_ptr + head)), 0.0)
        beta = tl.where(live, beta_scale * tl.sigmoid(beta), 0.0)
    sums = tl.cumsum(g, 0)
    total = tl.sum(tl.where(token == TOKENS - 1, sums, 0.0), 0)

    q_ptr += begin * Q_ROW + head // HEADS_PER_KEY * SIZE
    k_ptr += begin * K_ROW + head // HEADS_PER_KEY * SIZE
    key_scores, query_scores = tl.zeros([TOKENS, TOKENS], tl.float32), tl.zeros([TOKENS, TOKENS], tl.float32)
    k_squares, q_squares = tl.zeros([TOKENS], tl.float32), tl.zeros([TOKENS], tl.float32)
    for part in range(0, SIZE, BLOCK_N):
        n = part + tl.arange(0, BLOCK_N)
        inside = live[:, None] & (n < SIZE)[None, :]
        k = tl.load(k_ptr + (token[:, None] * K_ROW + n[None, :]), inside, other=0.0)
        q = tl.load(q_ptr + (token[:, None] * Q_ROW + n[None, :]), inside, other=0.0)
        key_scores = tl.dot(k, tl.trans(k), key_scores, input_precision="ieee")
        query_scores = tl.dot(q, tl.trans(k), query_scores, input_precision="ieee")
        k_squares += tl.sum(k.to(tl.float32) * k.to(tl.float32), 1)
        q_squares += tl.sum(q.to(tl.float32) * q.to(tl.float32), 1)
    k_norm, q_norm = tl.full([TOKENS], 1.0, tl.float32), tl.full([TOKENS], 1.0, tl.float32)
    if A_ptr is not None:
        k_norm, q_norm = tl.rsqrt(k_squares + 1e-6), tl.rsqrt(q_squares + 1e-6) * scale

    decay = tl.exp(tl.where(row >= column, sums[:, None] - sums[None, :], -float("inf")))
    matrix = (chunk * HEADS + head) * (TOKENS * TOKENS) + row * TOKENS + column
    query_scores = query_scores * q_norm[:, None] * k_norm[None, :] * decay
    tl.store(scores_ptr + matrix, query_scores.to(scores_ptr.dtype.element_ty))
    key_scores = key_scores * (beta * k_norm)[:, None] * k_norm[None, :] * decay
    inverse = inverse_of(tl.where(row > column, key_scores, 0.0), row, column, TOKENS, IS_EXACT) * beta[None, :]
    tl.store(inverses_ptr + matrix, inverse.to(inverses_ptr.dtype.element_ty))

    gates_ptr += (chunk * HEADS + head) * (4 * TOKENS) + token
    tl.store(gates_ptr, tl.exp(sums) * k_norm)
    tl.store(gates_ptr + TOKENS, tl.exp(sums) * q_norm)
    tl.store(gates_ptr + 2 * TOKENS, tl.exp(total - sums) * k_norm)
    tl.store(gates_ptr + 3 * TOKENS, tl.exp(sums))


@jit
def inverse_of(A, row, column, TOKENS: tl.constexpr, IS_EXACT: tl.constexpr):
    """Return (I + A)⁻¹ for a strictly lower triangular A, whose coefficients are as the delta rule defines them.

    Diagonal blocks of size 2 are inverted first, then blocks of twice the size until one covers the matrix:

        ⎡P 0⎤⁻¹   ⎡ P⁻¹          0 ⎤
        ⎣B Q⎦   = ⎣−Q⁻¹·B·P⁻¹   Q⁻¹⎦

    With X the inverses of the halves on the diagonal, the new block is the one at B's place in −X·A·X.

    IS_EXACT: compute products in float32. Otherwise their operands are float16, which is as precise as TF32 and takes
        half of the shared memory. With keys of unit length and beta at most 2 no number exceeds its range: those of all
        inverses are at most 2.
    """
    distance = row ^ column  # at least `half` between halves, and less than 2 · half within a block
    X = tl.where(row == column, 1.0, 0.0) - tl.where(distance == 1, A, 0.0)
    negative = (-A).to(tl.float32 if IS_EXACT else tl.float16)
    half = 2
    while half < TOKENS:
        is_between = distance // half == 1
        halves = X.to(negative.dtype)
        B = tl.where(is_between, negative, 0.0)
        product = tl.dot(B, halves, input_precision="ieee").to(negative.dtype)
        X += tl.dot(halves, product, input_precision="ieee")
        half *= 2
    return X


@jit
def _scan(
    q_ptr,
    k_ptr,
    v_ptr,
    gates_ptr,
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
    HEADS_PER_KEY: tl.constexpr,
    Q_ROW: tl.constexpr,
    K_ROW: tl.constexpr,
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
    matrix = token[:, None] * TOKENS + token[None, :]
    q_ptr, k_ptr = q_ptr + head // HEADS_PER_KEY * SIZE, k_ptr + head // HEADS_PER_KEY * SIZE
    v_ptr, o_ptr, pool_ptr = v_ptr + head * WIDTH, o_ptr + head * WIDTH, pool_ptr + head * (WIDTH * SIZE)

    own_ptr = pool_ptr + tl.load(slots_ptr + segment).to(tl.int64) * SLOT
    in_state = (n < SIZE)[:, None] & (p < WIDTH)[None, :]
    state = tl.load(own_ptr + (p[None, :] * SIZE + n[:, None]), in_state, other=0.0).to(tl.float32)
    first, end_chunk = tl.load(first_ptr + segment).to(tl.int64), tl.load(first_ptr + segment + 1).to(tl.int64)
    begin, end = tl.load(starts_ptr + first).to(tl.int64), tl.load(starts_ptr + first + 1).to(tl.int64)
    for chunk in range(first, end_chunk):
        # Load the next chunk's bounds now, so that the next chunk's loads need not wait for them, and overlap with this
        # chunk's computation.
        next_begin = tl.load(starts_ptr + chunk + 1).to(tl.int64)
        next_end = tl.load(starts_ptr + tl.minimum(chunk + 2, end_chunk)).to(tl.int64)
        live = token < (end - begin).to(tl.int32)
        in_v, in_k = live[:, None] & (p < WIDTH)[None, :], live[:, None] & (n < SIZE)[None, :]
        chunk_gates_ptr = gates_ptr + (chunk * HEADS + head) * (4 * TOKENS)
        recall_gates, read_gates = tl.load(chunk_gates_ptr + token), tl.load(chunk_gates_ptr + TOKENS + token)
        add_gates = tl.load(chunk_gates_ptr + 2 * TOKENS + token)
        total = tl.load(chunk_gates_ptr + 4 * TOKENS - 1)

        # Load each operand where it is used: in float32, all of them together exceed the shared memory of some GPUs.
        v = tl.load(v_ptr + begin * V_ROW + (token[:, None] * V_ROW + p[None, :]), in_v, other=0.0)
        k = tl.load(k_ptr + begin * K_ROW + (token[:, None] * K_ROW + n[None, :]), in_k, other=0.0)
        rounded_state = state.to(k.dtype)
        missing = v.to(tl.float32) - tl.dot(k, rounded_state, input_precision="ieee") * recall_gates[:, None]
        inverse = tl.load(inverses_ptr + (chunk * HEADS + head) * (TOKENS * TOKENS) + matrix)
        u = tl.dot(inverse, missing.to(v.dtype), input_precision="ieee")
        q = tl.load(q_ptr + begin * Q_ROW + (token[:, None] * Q_ROW + n[None, :]), in_k, other=0.0)
        o = tl.dot(q, rounded_state, input_precision="ieee") * read_gates[:, None]
        scores = tl.load(scores_ptr + (chunk * HEADS + head) * (TOKENS * TOKENS) + matrix)
        o = tl.dot(scores, u.to(v.dtype), o, input_precision="ieee")
        o_places = token[:, None] * O_ROW + p[None, :]
        tl.store(o_ptr + begin * O_ROW + o_places, o.to(v.dtype), in_v)

        transposed = tl.load(k_ptr + begin * K_ROW + (token[None, :] * K_ROW + n[:, None]), tl.trans(in_k), other=0.0)
        state = tl.dot(transposed, (u * add_gates[:, None]).to(k.dtype), state * total, input_precision="ieee")
        begin, end = next_begin, next_end
        save, saved = tl.load(saves_ptr + chunk).to(tl.int32), tl.load(saves_ptr + chunk + 1).to(tl.int32)
        if save < saved:
            for number in range(save, saved):
                save_ptr = pool_ptr + tl.load(saved_ptr + number).to(tl.int64) * SLOT
                tl.store(save_ptr + (p[None, :] * SIZE + n[:, None]), state.to(pool_ptr.dtype.element_ty), in_state)
    tl.store(own_ptr + (p[None, :] * SIZE + n[:, None]), state.to(pool_ptr.dtype.element_ty), in_state)
