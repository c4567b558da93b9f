"""Stochastic rounding of decoded states to bfloat16.

With rounding to the nearest, a state that changes by less than half a bfloat16 step per token would never change.
Stochastic rounding is right on average, so small changes add up.
"""

import torch
from torch import Tensor

NAN = 0x7FC0
"""The bits of bfloat16's NaN."""


def round_stochastically(states: Tensor, positions: Tensor) -> Tensor:
    """Round states, float32 [R, ...], to one of the two nearest bfloat16 numbers; the nearer one is more probable.

    A random integer of 16 bits is added to the float's bits before the lower 16 are cut off. The random integer is a
    pure function of the element's index in the state and of the row's absolute position, so it does not depend on other
    rows or on threads. Its arithmetic is on wrapping integers, so it is the same on every device.
    Every NaN becomes NAN: with an integer added, the bits of the NaN that GPUs produce, 0x7FFFFFFF, would become -0.

    positions: int64 [R], each row's absolute position.
    """
    places = torch.arange(states[0].numel(), dtype=torch.int32, device=states.device)
    chance = _mix(places + _mix(positions.int())[:, None]) >> 16 & 0xFFFF
    bits = states.contiguous().view(torch.int32) + chance.view(states.shape)
    return torch.where(states.isnan(), NAN, bits >> 16).to(torch.int16).view(torch.bfloat16)


def _mix(x: Tensor) -> Tensor:
    """Hash int32 numbers; the upper bits are mixed best. The multipliers come from Wellons' lowbias32."""
    x = x * 0x7FEB352D
    return (x ^ (x >> 15 & 0x1FFFF)) * (0x846CA68B - 2**32)
