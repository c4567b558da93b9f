"""The gated delta rule in torch, with one decay per head or one per channel of the keys, computed in float32.

For each token and head: S ← S·diag(exp(g)), then S ← S + beta·(v − S·k)⊗k, and o = S·q.
S·k is the value that the state has stored for the key k. The rule moves it towards v, by the fraction beta.

One decay per head is the gated delta net of Yang, Kautz and Hatamizadeh, 2024, arXiv:2412.06464.
One decay per channel is Kimi Delta Attention of the Kimi Team, 2025, arXiv:2510.26692.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from baton.kernels.prefill.chunk_table import ChunkTable
from baton.kernels.state_pool.rounding import round_stochastically

BLOCK = 16
"""Maximum tokens of a block with one decay per channel.

The score of each pair of tokens contains the product of the decays between the two. A single matrix product for all
pairs would need that product as two factors, exp(γ_i) and exp(−γ_j), which may be 0 and ∞.
"""


def unit_length(x: Tensor) -> Tensor:
    """Return x · rsqrt(Σ x² + 1e-6) over the last dimension, as queries and keys are normalised before the rule."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def log_decays(x: Tensor, A: Tensor, lower_bound: float | None) -> Tensor:
    """Return A·softplus(x), or lower_bound·σ(−A·x) if there is a bound. A: negative."""
    return A * F.softplus(x) if lower_bound is None else lower_bound * (-A * x).sigmoid()


def delta_scan(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, table: ChunkTable) -> Tensor:
    """Run the rule over packed segments: o float32 [T, Hv, Dv].

    The pool is updated in place: each segment's slot is read as the state before its first token and receives the state
    at its end; each checkpoint's slot receives the state at its position. States are rounded only on these writes, not
    between chunks. Segments are computed one chunk after the other, so that no result depends on another segment.

    q, k: float32 [T, Hk, Dk], of unit length, q also scaled.
    v: float32 [T, Hv, Dv]; head h uses q and k of head h // (Hv // Hk).
    g: float32, the log decays, at most 0: [T, Hv], or [T, Hv, Dk] with one decay per channel, where Hv = Hk.
    beta: float32 [T, Hv].
    pool: [slots, Hv, Dv, Dk], float32 or bfloat16.
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
    """Run the rule for one token of each row, and update the row's state in place: o float32 [R, Hv, Dv].

    q, k, v, g, beta: as in delta_scan, with R rows instead of T tokens.
    pool: [slots, Hv, Dv, Dk], float32, or bfloat16 with stochastic rounding. o is computed before the rounding.
    slots: int64 [R], all different.
    positions: int64 [R], the absolute position of each row's token, which seeds the rounding.
    """
    (rows, heads, _), per_key = v.shape, v.shape[1] // k.shape[1]
    q, k = q.repeat_interleave(per_key, 1), k.repeat_interleave(per_key, 1)
    state = pool[slots].float() * g.exp().view(rows, heads, 1, -1)
    change = beta[..., None] * (v - (state * k[:, :, None]).sum(-1))
    state += change[..., None] * k[:, :, None]
    pool[slots] = state if pool.dtype == torch.float32 else round_stochastically(state, positions)
    return (state * q[:, :, None]).sum(-1)


def _by_head(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return o [L, Hv, Dv] of the L tokens of a chunk, and the state after them: the WY form, one decay per head.

    Each token adds change⊗k to the state, where change is beta times the difference between its value and the value
    that the state has stored for k. The stored value depends on the changes of the chunk's previous tokens, so all
    changes are the solution of a triangular system. With γ the running sum of g and S the state before the chunk:
    (I + strictly lower(beta · K·Kᵀ ⊙ exp(γ_i − γ_j))) · change = beta · (V − exp(γ)·K·Sᵀ).
    """
    per_key = v.shape[1] // k.shape[1]
    products, scores = (_of_heads(x) @ _of_heads(k).mT for x in (k, q))
    products, scores = products.repeat_interleave(per_key, 0), scores.repeat_interleave(per_key, 0)
    q, k = (_of_heads(x).repeat_interleave(per_key, 0) for x in (q, k))
    v, beta, log_decay = _of_heads(v), beta.t()[..., None], g.cumsum(0).t()
    decay, from_start = _decay_by_head(log_decay), log_decay.exp()[..., None]
    to_end = (log_decay[:, -1:] - log_decay).exp()[..., None]

    right_side = beta * (v - from_start * (k @ state.mT))
    change = torch.linalg.solve_triangular(beta * products * decay, right_side, upper=False, unitriangular=True)
    o = from_start * (q @ state.mT) + (scores * decay) @ change
    state = from_start[:, -1:] * state + change.mT @ (to_end * k)
    return o.transpose(0, 1), state


def _by_channel(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `_by_head` returns, for up to BLOCK tokens and with one decay per channel.

    The triangular system is (I + strictly lower(beta · Σ_d k_id·k_jd·exp(γ_id − γ_jd))) · change = beta · (V −
    (exp(γ)⊙K)·Sᵀ).
    """
    q, k, v, log_decay = (x.transpose(0, 1) for x in (q, k, v, g.cumsum(0)))
    beta, decay, from_start = beta.t()[..., None], _decay_by_channel(log_decay), log_decay.exp()
    products, scores = ((x[:, :, None] * decay * k[:, None]).sum(-1) for x in (k, q))
    right_side = beta * (v - (from_start * k) @ state.mT)
    change = torch.linalg.solve_triangular(beta * products, right_side, upper=False, unitriangular=True)
    o = (from_start * q) @ state.mT + scores @ change
    state = state * from_start[:, -1:] + change.mT @ (decay[:, -1] * k)
    return o.transpose(0, 1), state


def _of_heads(x: Tensor) -> Tensor:
    """Transpose [L, H, D] to [H, L, D]."""
    return x.transpose(0, 1)


def _decay_by_head(log_decay: Tensor) -> Tensor:
    """Return exp(γ_i − γ_j) for j ≤ i, else 0: [H, L] → [H, L, L]. Masked before exp, which may overflow for j > i."""
    later = torch.ones(log_decay.shape[1], log_decay.shape[1], dtype=torch.bool, device=log_decay.device).triu(1)
    return (log_decay[:, :, None] - log_decay[:, None, :]).masked_fill_(later, -torch.inf).exp_()


def _decay_by_channel(log_decay: Tensor) -> Tensor:
    """Return exp(γ_i − γ_j) for j ≤ i, else 0: [H, L, D] → [H, L, L, D]. Masked before exp as in `_decay_by_head`."""
    length = log_decay.shape[1]
    later = torch.ones(length, length, dtype=torch.bool, device=log_decay.device).triu(1)
    return (log_decay[:, :, None] - log_decay[:, None]).masked_fill_(later[..., None], -torch.inf).exp_()
