"""The gated delta rule in torch, with a decay for each head or for each channel of the keys.

S ← S·diag(exp(g)), then S ← S + beta·(v − S·k)⊗k, o = S·q. Computed in float32.
One decay a head: Yang, Kautz and Hatamizadeh, 2024, arXiv:2412.06464. One a channel: Kimi Delta Attention, Kimi Team,
2025, arXiv:2510.26692.
"""

import torch
from torch import Tensor

from baton.kernels.prefill.chunk_table import ChunkTable
from baton.kernels.state_pool.rounding import round_by_chance

BLOCK = 16
"""Tokens that are related at once with a decay for each channel. Each pair of them has its own ratio of decays: as two
factors, so that the scores were one product of matrices, it could be 0·∞."""


def unit_length(x: Tensor) -> Tensor:
    """Return x · rsqrt(Σ x² + 1e-6) over the last dimension: queries and keys, before the rule."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def delta_scan(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, table: ChunkTable) -> Tensor:
    """Run the rule over packed segments, a chunk at a time, so that a chunk's result depends on no other segment.

    q, k: float32 [T, Hk, Dk], already scaled and of unit length.
    v: float32 [T, Hv, Dv]; head h reads q and k of head h // (Hv // Hk).
    g: at most 0; float32 [T, Hv], or [T, Hv, Dk] with a decay for each channel, where Hv = Hk.
    beta: float32 [T, Hv].
    pool: [slots, Hv, Dv, Dk], float32 or bfloat16. It holds each segment's state before its first token; afterwards the
        state at its end and, in each checkpoint's slot, the state *after* the chunk that ends there. States are rounded
        when they are stored, not from chunk to chunk.
    Returns o [T, Hv, Dv].
    """
    o, lists = torch.empty_like(v), table.lists
    step, of_tokens = (BLOCK, _by_channel) if g.dim() == 3 else (table.longest, _by_head)
    for segment, slot in enumerate(lists.slots):
        state = pool[slot].float()
        for chunk in range(lists.first[segment], lists.first[segment + 1]):
            begin, end = lists.starts[chunk], lists.starts[chunk + 1]
            for at in range(begin, end, step):
                rows = slice(at, min(at + step, end))
                o[rows], state = of_tokens(q[rows], k[rows], v[rows], g[rows], beta[rows], state)
            for saved in lists.saved[lists.saves[chunk] : lists.saves[chunk + 1]]:
                pool[saved] = state
        pool[slot] = state
    return o


def delta_update(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, slots: Tensor, positions: Tensor
) -> Tensor:
    """Run the rule for one token of each row, and update the row's state in place.

    q, k, v, g, beta: as in delta_scan, of R rows.
    pool: [slots, Hv, Dv, Dk], float32, or bfloat16, to which a state is stochastically rounded when it is stored; o is
        computed from the state before that.
    slots: int64 [R], no slot twice.
    positions: int64 [R], of the tokens.
    Returns o [R, Hv, Dv].
    """
    (rows, heads, _), per_key = v.shape, v.shape[1] // k.shape[1]
    q, k = q.repeat_interleave(per_key, 1), k.repeat_interleave(per_key, 1)
    state = pool[slots].float() * g.exp().view(rows, heads, 1, -1)
    change = beta[..., None] * (v - (state * k[:, :, None]).sum(-1))
    state += change[..., None] * k[:, :, None]
    pool[slots] = state if pool.dtype == torch.float32 else round_by_chance(state, positions)
    return (state * q[:, :, None]).sum(-1)


def _by_head(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return o [L, Hv, Dv] of up to 64 tokens and the state after them, given the state before: the WY form.

    With γ the running sum of g, each token changes the state by the value that it wants, less the value that is there:
    (I + strictly lower(beta · K·Kᵀ ⊙ exp(γ_i − γ_j))) · change = beta · (V − exp(γ)·K·Sᵀ).
    """
    per_key = v.shape[1] // k.shape[1]
    products, scores = (_of_heads(x) @ _of_heads(k).mT for x in (k, q))
    products, scores = products.repeat_interleave(per_key, 0), scores.repeat_interleave(per_key, 0)
    q, k = (_of_heads(x).repeat_interleave(per_key, 0) for x in (q, k))
    v, beta, log_decay = _of_heads(v), beta.t()[..., None], g.cumsum(0).t()
    decay, from_start = _decay_by_head(log_decay), log_decay.exp()[..., None]
    to_end = (log_decay[:, -1:] - log_decay).exp()[..., None]

    wanted = beta * (v - from_start * (k @ state.mT))
    change = torch.linalg.solve_triangular(beta * products * decay, wanted, upper=False, unitriangular=True)
    o = from_start * (q @ state.mT) + (scores * decay) @ change
    state = from_start[:, -1:] * state + change.mT @ (to_end * k)
    return o.transpose(0, 1), state


def _by_channel(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Do the same as `_by_head` for up to BLOCK tokens, with a decay for each channel.

    (I + strictly lower(beta · Σ_d k_id·k_jd·exp(γ_id − γ_jd))) · change = beta · (V − (exp(γ)⊙K)·Sᵀ).
    """
    q, k, v, log_decay = (x.transpose(0, 1) for x in (q, k, v, g.cumsum(0)))
    beta, decay, from_start = beta.t()[..., None], _decay_by_channel(log_decay), log_decay.exp()
    products, scores = ((x[:, :, None] * decay * k[:, None]).sum(-1) for x in (k, q))
    wanted = beta * (v - (from_start * k) @ state.mT)
    change = torch.linalg.solve_triangular(beta * products, wanted, upper=False, unitriangular=True)
    o = (from_start * q) @ state.mT + scores @ change
    state = state * from_start[:, -1:] + change.mT @ (decay[:, -1] * k)
    return o.transpose(0, 1), state


def _of_heads(x: Tensor) -> Tensor:
    """[L, H, D] → [H, L, D]."""
    return x.transpose(0, 1)


def _decay_by_head(log_decay: Tensor) -> Tensor:
    """exp(γ_i − γ_j) for j ≤ i, else 0: [H, L] → [H, L, L]; masked before exp, where it would be infinite."""
    later = torch.ones(log_decay.shape[1], log_decay.shape[1], dtype=torch.bool, device=log_decay.device).triu(1)
    return (log_decay[:, :, None] - log_decay[:, None, :]).masked_fill_(later, -torch.inf).exp_()


def _decay_by_channel(log_decay: Tensor) -> Tensor:
    """exp(γ_i − γ_j) for j ≤ i, else 0: [H, L, D] → [H, L, L, D]; masked before exp, where it would be infinite."""
    length = log_decay.shape[1]
    later = torch.ones(length, length, dtype=torch.bool, device=log_decay.device).triu(1)
    return (log_decay[:, :, None] - log_decay[:, None]).masked_fill_(later[..., None], -torch.inf).exp_()
