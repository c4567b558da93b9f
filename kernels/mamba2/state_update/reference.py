"""One step of the Mamba-2 recurrence for each row, in place."""

import torch
from torch import Tensor

from baton.kernels.state_pool.rounding import round_by_chance


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
    """h ← exp(dt·A)·h + dt·x⊗B, y = C·h + D·x; float32 throughout.

    x: [R, H, P]; dt: [R, H], positive; A, D: [H]; B, C: [R, G, N]; slots: int64 [R].
    pool: [slots, H, P, N], float32 or bfloat16, to which h is rounded by chance when it is kept; y is that of h before.
    positions: int64 [R], of the tokens. Returns y [R, H, P].
    """
    per_group = x.shape[1] // B.shape[1]
    B, C = B.repeat_interleave(per_group, 1), C.repeat_interleave(per_group, 1)
    state = pool[slots].float() * (dt * A).exp()[..., None, None]
    state += (x * dt[..., None])[..., None] * B[:, :, None]
    pool[slots] = state if pool.dtype == torch.float32 else round_by_chance(state, positions)
    return torch.einsum("rhpn,rhn->rhp", state, C) + D[:, None] * x
