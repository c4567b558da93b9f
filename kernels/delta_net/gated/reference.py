"""The gated delta rule (Yang, Kautz and Hatamizadeh, 2024, arXiv:2412.06464), in torch.

S ← exp(g)·S, then S ← S + beta·(v − S·k)⊗k, o = S·q. Computed in float32.
"""

import torch
from torch import Tensor

from baton.kernels.prefill.chunk_table import ChunkTable
from baton.kernels.state_pool.rounding import round_by_chance


def unit_length(x: Tensor) -> Tensor:
    """x · rsqrt(Σ x² + 1e-6) over the last dimension: of queries and keys, before the rule."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def gated_delta_prefill(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, table: ChunkTable
) -> Tensor:
    """Packed segments, a chunk at a time: so what a chunk gets depends on nothing beside it.

    q, k: float32 [T, Hk, Dk], with the scale and the lengths that they shall have; v: float32 [T, Hv, Dv], head h reads
    q and k of head h // (Hv // Hk); g (at most 0), beta: float32 [T, Hv].
    pool: [slots, Hv, Dv, Dk], float32 or bfloat16, holds each segment's state before its first token; afterwards that
    at its end, and in each checkpoint's slot that *after* the chunk that ends there. States are rounded where they are
    kept, and only there: not from chunk to chunk. Returns o [T, Hv, Dv].
    """
    o, lists = torch.empty_like(v), table.lists
    for segment, slot in enumerate(lists.slots):
        state = pool[slot].float()
        for chunk in range(lists.first[segment], lists.first[segment + 1]):
            rows = slice(lists.starts[chunk], lists.starts[chunk + 1])
            o[rows], state = _chunk(q[rows], k[rows], v[rows], g[rows], beta[rows], state)
            for saved in lists.saved[lists.saves[chunk] : lists.saves[chunk + 1]]:
                pool[saved] = state
        pool[slot] = state
    return o


def gated_delta_update(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, slots: Tensor, positions: Tensor
) -> Tensor:
    """One token for each row, its state updated in place; q, k, v, g and beta as in gated_delta_prefill, of R rows.

    pool: [slots, Hv, Dv, Dk], float32, or bfloat16, to which a state is rounded by chance when it is kept; o is that of
    the state before. slots: int64 [R], no two alike; positions: int64 [R], of the tokens. Returns o [R, Hv, Dv].
    """
    per_key = v.shape[1] // k.shape[1]
    q, k = q.repeat_interleave(per_key, 1), k.repeat_interleave(per_key, 1)
    state = pool[slots].float() * g.exp()[..., None, None]
    change = beta[..., None] * (v - (state * k[:, :, None]).sum(-1))
    state += change[..., None] * k[:, :, None]
    pool[slots] = state if pool.dtype == torch.float32 else round_by_chance(state, positions)
    return (state * q[:, :, None]).sum(-1)


def _chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The WY form of up to 64 tokens of a segment: o [L, Hv, Dv] and the state after them, from that before.

    With γ the running sum of g, each token's change of the state is the value that it wants less what is there:
    (I + strictly lower(beta · K·Kᵀ ⊙ exp(γ_i − γ_j))) · change = beta · (V − exp(γ)·K·Sᵀ).
    """
    per_key = v.shape[1] // k.shape[1]
    products, scores = (_of_heads(x) @ _of_heads(k).mT for x in (k, q))
    products, scores = products.repeat_interleave(per_key, 0), scores.repeat_interleave(per_key, 0)
    q, k = (_of_heads(x).repeat_interleave(per_key, 0) for x in (q, k))
    v, beta, log_decay = _of_heads(v), beta.t()[..., None], g.cumsum(0).t()
    decay, from_start = _decay(log_decay), log_decay.exp()[..., None]
    to_end = (log_decay[:, -1:] - log_decay).exp()[..., None]

    wanted = beta * (v - from_start * (k @ state.mT))
    change = torch.linalg.solve_triangular(beta * products * decay, wanted, upper=False, unitriangular=True)
    o = from_start * (q @ state.mT) + (scores * decay) @ change
    state = from_start[:, -1:] * state + change.mT @ (to_end * k)
    return o.transpose(0, 1), state


def _of_heads(x: Tensor) -> Tensor:
    """[L, H, D] → [H, L, D]."""
    return x.transpose(0, 1)


def _decay(log_decay: Tensor) -> Tensor:
    """exp(γ_i − γ_j) for j ≤ i, else 0: [H, L] → [H, L, L]; masked before exp, where it would be infinite."""
    later = torch.ones(log_decay.shape[1], log_decay.shape[1], dtype=torch.bool, device=log_decay.device).triu(1)
    return (log_decay[:, :, None] - log_decay[:, None, :]).masked_fill_(later, -torch.inf).exp_()
