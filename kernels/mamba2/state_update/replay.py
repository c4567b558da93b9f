"""The Mamba-2 recurrence with a ring of recent inputs, so that a state is written only once per window of positions.

At each token the state is read, and the inputs since its last write are replayed on it. A slot holds the state after
`written_at` tokens; the inputs of later tokens lie in the ring at index position mod window:

    position     0 ........ 8 ......... 16 .. 19          (window 8, decoding began at or before 16)
    slot         state after 16 tokens
    ring                                0 1 2             inputs of tokens 16, 17, 18
"""

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class InputRing:
    """One layer's ring of recent inputs, float32. A row keeps its place (the first index) as long as it decodes."""

    x_dt: Tensor  # x·dt, [rows, window, H, P]
    decay: Tensor  # exp(dt·A), [rows, window, H]
    B: Tensor  # [rows, window, G, N]

    @property
    def window(self) -> int:
        """Positions between two writes of a state, a power of two."""
        return self.decay.shape[1]


def written_at(position: int, start: int, window: int) -> int:
    """Return the number of tokens that the state in a slot includes.

    position: how many tokens have been fed in all. start: how many had been fed when the row began to use the ring.
    """
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
    """Compute reference.selective_state_update with the ring: the same bits of y, [R, H, P].

    The states in the pool equal the reference's at each multiple of the window.

    pool: float32 only, because a bfloat16 state would have to be rounded at each token.
    places: int64 [R], each row's place in the ring.
    starts: int64 [R], the number of tokens in a row's slot when the row began to use the ring; unchanged until the row
        is flushed.
    dt_bias: float32 [H] or None; with it, dt becomes softplus(dt + dt_bias), clamped to dt_limits.
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
        if at == ring.window - 1:  # The window is full: write the state, and start the ring again.
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
    """Write the states after `positions` tokens to the slots `targets`, int64 [R]; None: to the rows' own slots.

    A row whose own slot was written must continue with that position as its start. A row whose state was copied to
    another slot continues with its old start.
    """
    pool[slots if targets is None else targets] = replayed(pool, slots, positions, ring, places, starts)


def replayed(pool: Tensor, slots: Tensor, positions: Tensor, ring: InputRing, places: Tensor, starts: Tensor) -> Tensor:
    """Return the states after `positions` tokens, [R, H, P, N]: the slots' states, advanced by the ring's inputs."""
    states = pool[slots]
    for state, place, position, start in zip(states, places.tolist(), positions.tolist(), starts.tolist(), strict=True):
        for fed in range(written_at(position, start, ring.window), position):
            at = place, fed % ring.window
            _advance(state, ring.decay[at], ring.x_dt[at], ring.B[at])
    return states


def _advance(state: Tensor, decay: Tensor, x_dt: Tensor, B: Tensor) -> None:
    """Advance a state [H, P, N] by one token in place; decay: [H], x_dt: [H, P], B: [G, N]."""
    state *= decay[:, None, None]
    state += x_dt[..., None] * B.repeat_interleave(len(state) // len(B), 0)[:, None]
