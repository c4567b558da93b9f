"""Chunked state-space dual form of Mamba-2 (Dao and Gu, 2024, arXiv:2405.21060, section 6), in torch."""

import torch
from torch import Tensor

from baton.kernels.prefill.scan import ChunkPlan


def ssd_prefill(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, pool: Tensor, plan: ChunkPlan
) -> Tensor:
    """Run packed segments through h ← exp(dt·A)·h + dt·x⊗B, y = C·h + D·x, chunk by chunk; return y [T, H, P].

    Computed in float32 throughout; the pool is updated in place.

    x: [T, H, P]. dt: [T, H], positive. A: [H], negative. D: [H].
    B, C: [T, G, N]; head h reads group h // (H // G).
    pool: [slots, H, P, N], float32 or bfloat16. Each segment's slot is read as the state before its first token and
        receives the state at its end; each checkpoint's slot receives the state *after* the chunk that ends there.
        States are rounded only when written, not between chunks.
    """
    heads, width, groups, size = *x.shape[1:], *B.shape[1:]
    chunks, length = plan.index.shape
    per_group = heads // groups

    dt = dt[plan.index] * plan.valid[..., None]
    x_dt = (x[plan.index] * dt[..., None]).view(chunks, length, groups, per_group, width)
    B, C = B[plan.index], C[plan.index]
    a = (dt * A).cumsum(1)
    grouped = a.view(chunks, length, groups, per_group)

    within = _decay(a).view(chunks, groups, per_group, length, length)
    scores = torch.einsum("clgn,csgn->cgls", C, B)
    y = torch.einsum("cghls,csghp->clghp", scores[:, :, None] * within, x_dt)

    to_end = (grouped[:, -1:] - grouped).exp()
    added = torch.einsum("clghp,clgn->cghpn", x_dt * to_end[..., None], B)
    before = _scan(added.view(chunks, heads, width, size), a[:, -1].exp(), pool, plan)
    carried = torch.einsum("clgn,cghpn->clghp", C, before.view(chunks, groups, per_group, width, size))
    y += carried * grouped.exp()[..., None]
    return y.reshape(chunks * length, heads, width)[plan.place] + D[:, None] * x


def _decay(a: Tensor) -> Tensor:
    """Return exp(a_i − a_j) for j ≤ i, else 0: [chunks, length, H] → [chunks, H, length, length]."""
    a = a.transpose(1, 2)
    later = torch.ones(a.shape[-1], a.shape[-1], dtype=torch.bool, device=a.device).triu(1)
    return (a[..., :, None] - a[..., None, :]).masked_fill_(later, -torch.inf).exp_()


def _scan(added: Tensor, decay: Tensor, pool: Tensor, plan: ChunkPlan) -> Tensor:
    """Return the state *before* each chunk, [chunks, H, P, N]; write states at ends and checkpoints to the pool.

    added: [chunks, H, P, N], what each chunk adds to the state by its end.
    decay: [chunks, H], each chunk's total decay.
    """
    before = torch.empty_like(added)
    state = pool[plan.slots].float()
    done = 0
    for chunks in plan.rounds:
        part, rows = slice(done, done + len(chunks)), slice(len(chunks))
        before[part] = state[rows]
        state[rows] = state[rows] * decay[part, :, None, None] + added[part]
        for chunk in chunks:
            for slot in chunk.slots:
                pool[slot] = state[chunk.row]
        done = part.stop
    pool[plan.slots] = state.to(pool.dtype)
    return before
