"""Kimi Delta Attention (Kimi Team, 2025, arXiv:2510.26692), in torch: a delta rule with a decay for each channel.

S ← S·diag(exp(g)), then S ← S + beta·(v − S·k)⊗k, o = S·q. Computed in float32.
"""

import torch
from torch import Tensor

from baton.kernels.prefill.chunk_table import ChunkTable
from baton.kernels.state_pool.rounding import round_by_chance

BLOCK = 16
"""Tokens of which each two have their ratio of decays: as two factors, of matrices, it may be 0·∞."""


def kda_scan(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, table: ChunkTable) -> Tensor:
    """Packed segments, a chunk at a time: so what a chunk gets depends on nothing beside it.

    q, k: float32 [T, H, Dk], with the scale and the lengths that they shall have; g: float32 [T, H, Dk], at most 0;
    v: float32 [T, H, Dv]; beta: float32 [T, H].
    pool: [slots, H, Dv, Dk], float32 or bfloat16, holds each segment's state before its first token; afterwards that
    at its end, and in each checkpoint's slot that *after* the chunk that ends there. States are rounded where they are
    kept, and only there: not from chunk to chunk. Returns o [T, H, Dv].
    """
    o, lists = torch.empty_like(v), table.lists
    for segment, slot in enumerate(lists.slots):
        state = pool[slot].float()
        for chunk in range(lists.first[segment], lists.first[segment + 1]):
            begin, end = lists.starts[chunk], lists.starts[chunk + 1]
            for at in range(begin, end, BLOCK):
                rows = slice(at, min(at + BLOCK, end))
                o[rows], state = _block(q[rows], k[rows], v[rows], g[rows], beta[rows], state)
            for saved in lists.saved[lists.saves[chunk] : lists.saves[chunk + 1]]:
                pool[saved] = state
        pool[slot] = state
    return o


def kda_update(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, slots: Tensor, positions: Tensor
) -> Tensor:
    """One token for each row, its state updated in place; q, k, v, g and beta as in kda_scan, of R rows.

    pool: [slots, H, Dv, Dk], float32, or bfloat16, to which a state is rounded by chance when it is kept; o is that of
    the state before. slots: int64 [R], no two alike; positions: int64 [R], of the tokens. Returns o [R, H, Dv].
    """
    state = pool[slots].float() * g.exp()[:, :, None]
    change = beta[..., None] * (v - (state * k[:, :, None]).sum(-1))
    state += change[..., None] * k[:, :, None]
    pool[slots] = state if pool.dtype == torch.float32 else round_by_chance(state, positions)
    return (state * q[:, :, None]).sum(-1)


def _block(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The WY form of a few tokens of a segment: o [L, H, Dv] and the state after them, from that before.

    With γ the running sum of g, each token's change of the state is the value that it wants less what is there:
    (I + strictly lower(beta · Σ_d k_id·k_jd·exp(γ_id − γ_jd))) · change = beta · (V − (exp(γ)⊙K)·Sᵀ).
    """
    q, k, v, log_decay = (x.transpose(0, 1) for x in (q, k, v, g.cumsum(0)))
    beta, decay, from_start = beta.t()[..., None], _decay(log_decay), log_decay.exp()
    products, scores = ((x[:, :, None] * decay * k[:, None]).sum(-1) for x in (k, q))
    wanted = beta * (v - (from_start * k) @ state.mT)
    change = torch.linalg.solve_triangular(beta * products, wanted, upper=False, unitriangular=True)
    o = (from_start * q) @ state.mT + scores @ change
    state = state * from_start[:, -1:] + change.mT @ (decay[:, -1] * k)
    return o.transpose(0, 1), state


def _decay(log_decay: Tensor) -> Tensor:
    """exp(γ_i − γ_j) for j ≤ i, else 0: [H, L, D] → [H, L, L, D]; masked before exp, where it would be infinite."""
    length = log_decay.shape[1]
    later = torch.ones(length, length, dtype=torch.bool, device=log_decay.device).triu(1)
    return (log_decay[:, :, None] - log_decay[:, None]).masked_fill_(later[..., None], -torch.inf).exp_()
