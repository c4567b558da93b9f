"""One step of the Mamba-2 recurrence (Dao and Gu, 2024, arXiv:2405.21060) for each row, in place."""

import torch
from torch import Tensor

from baton.kernels.state_pool.rounding import round_stochastically


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
) -> Tensor:
    """Advance each row's state by h ← exp(dt·A)·h + dt·x⊗B in place, and return y = C·h + D·x, [R, H, P].

    Computed in float32 throughout.

    x: [R, H, P]. dt: [R, H], positive. A, D: [H]. B, C: [R, G, N]; head h reads group h // (H // G).
    pool: [slots, H, P, N], float32 or bfloat16. A bfloat16 pool gets h with stochastic rounding
        (kernels/state_pool/rounding.py); y is computed from h before it is rounded.
    slots: int64 [R], all different.
    positions: int64 [R], the tokens' absolute positions, which seed the rounding.
    """
    per_group = x.shape[1] // B.shape[1]
    B, C = B.repeat_interleave(per_group, 1), C.repeat_interleave(per_group, 1)
    state = pool[slots].float() * (dt * A).exp()[..., None, None]
    state += (x * dt[..., None])[..., None] * B[:, :, None]
    pool[slots] = state if pool.dtype == torch.float32 else round_stochastically(state, positions)
    return torch.einsum("rhpn,rhn->rhp", state, C) + D[:, None] * x
