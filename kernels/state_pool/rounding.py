"""How a decoded state is kept in bfloat16: rounded by chance, so that what is too small to show adds up all the same.

To the nearest, a state that decays or grows by less than half a step of bfloat16 a token would stand still.
"""

import torch
from torch import Tensor


def round_by_chance(states: Tensor, positions: Tensor) -> Tensor:
    """bfloat16 of states, float32 [R, ...]: one of the two nearest, the likelier the nearer it is.

    The chance is a pure function of the place in the state and of the row's absolute position, int64 [R]: it depends
    neither on other rows nor on threads. Integer arithmetic that wraps, so it is the same on every device. A NaN stays
    one if the 16 bits that go are 0, as arithmetic makes them.
    """
    places = torch.arange(states[0].numel(), dtype=torch.int32, device=states.device)
    chance = _mix(places + _mix(positions.int())[:, None]) >> 16 & 0xFFFF
    bits = states.contiguous().view(torch.int32) + chance.view(states.shape)
    return (bits >> 16).to(torch.int16).view(torch.bfloat16)


def _mix(x: Tensor) -> Tensor:
    """Of 32 bits, the upper ones the better; the multipliers are those of Wellons' lowbias32."""
    x = x * 0x7FEB352D
    return (x ^ (x >> 15 & 0x1FFFF)) * (0x846CA68B - 2**32)
