"""The recurrence with its inputs kept: a state is written once in a window of positions, and read at each of them.

A slot holds the state after `written_at` tokens; the inputs of those since then lie in a ring, at position mod window.
"""

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class InputRing:
    """One layer's kept inputs, float32: x·dt [rows, window, H, P], exp(dt·A) [rows, window, H], B [rows, window, G, N].

    A row keeps its place in it as long as it decodes. window: a power of two.
    """

    x_dt: Tensor
    decay: Tensor
    B: Tensor

    @property
    def window(self) -> int:
        return self.decay.shape[1]


def written_at(position: int, start: int, window: int) -> int:
    """After how many tokens the state was written that is in a slot, `position` having been fed, here since start."""
    return max(start, position // window * window)


def replay_state_update(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    pool: Tensor,
    slots: Tensor,
    positions: Tensor,
    ring: InputRing,
    places: Tensor,
    starts: Tensor,
    *,
    dt_bias: Tensor | None = None,
    dt_limits: tuple[float, float] = (0.0, inf),
) -> Tensor:
    """See reference.selective_state_update: the same bits, and the same state at each multiple of the window.

    pool: float32 only, since one of bfloat16 is rounded at each token. places: int64 [R], the rows' places in the ring.
    starts: int64 [R], after how many tokens a row began to decode here, its slot exact; the same until it is flushed.
    dt_bias: float32 [H]; with it, dt is softplus(dt + dt_bias), clamped to dt_limits.
    """
    if dt_bias is not None:
        dt = F.softplus(dt.float() + dt_bias).clamp(*dt_limits)
    per_group = x.shape[1] // B.shape[1]
    states = replayed(pool, slots, positions, ring, places, starts)
    decay, x_dt = (dt * A).exp(), x * dt[..., None]
    for row, (state, slot, place, position) in enumerate(
        zip(states, slots.tolist(), places.tolist(), positions.tolist(), strict=True)
    ):
        _advance(state, decay[row], x_dt[row], B[row])
        at = position % ring.window
        if at == ring.window - 1:
            pool[slot] = state
        else:
            ring.x_dt[place, at], ring.decay[place, at], ring.B[place, at] = x_dt[row], decay[row], B[row]
    return torch.einsum("rhpn,rhn->rhp", states, C.repeat_interleave(per_group, 1)) + D[:, None] * x


def flush(
    pool: Tensor,
    slots: Tensor,
    positions: Tensor,
    ring: InputRing,
    places: Tensor,
    starts: Tensor,
    targets: Tensor | None = None,
) -> None:
    """Write to `targets`, int64 [R], the states after `positions` tokens; None: to their slots.

    A row whose own slot was written goes on with that position as its start; one copied elsewhere, as before.
    """
    pool[slots if targets is None else targets] = replayed(pool, slots, positions, ring, places, starts)


def replayed(pool: Tensor, slots: Tensor, positions: Tensor, ring: InputRing, places: Tensor, starts: Tensor) -> Tensor:
    """The states after `positions` tokens: [R, H, P, N]."""
    states = pool[slots]
    for state, place, position, start in zip(states, places.tolist(), positions.tolist(), starts.tolist(), strict=True):
        for fed in range(written_at(position, start, ring.window), position):
            at = place, fed % ring.window
            _advance(state, ring.decay[at], ring.x_dt[at], ring.B[at])
    return states


def _advance(state: Tensor, decay: Tensor, x_dt: Tensor, B: Tensor) -> None:
    """In place: state [H, P, N], decay [H], x_dt [H, P], B [G, N]."""
    state *= decay[:, None, None]
    state += x_dt[..., None] * B.repeat_interleave(len(state) // len(B), 0)[:, None]
