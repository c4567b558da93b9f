"""The same as reference.py, a block of tokens at a time: the shifted passes over a block run in the cache."""

import torch
from torch import Tensor

from baton.kernels.conv1d.reference import convolve
from baton.kernels.prefill.convolution import ConvPlan

BLOCK = 128


def conv1d_prefill(x: Tensor, taps: Tensor, bias: Tensor | None, pool: Tensor, plan: ConvPlan) -> Tensor:
    """See reference.conv1d_prefill."""
    y = torch.empty(x.shape, dtype=torch.float32)
    rows = torch.empty(plan.history + BLOCK, x.shape[1])
    for segment, slot in enumerate(plan.slots):
        saved = [(length, target) for owner, length, target in plan.saved if owner == segment]
        first, last = plan.offsets[segment : segment + 2]
        rows[: plan.history] = pool[slot]
        for begin in range(first, last, BLOCK):
            end = min(begin + BLOCK, last)
            count, fed = end - begin, begin - first
            rows[plan.history : plan.history + count] = x[begin:end]
            convolve(rows[: plan.history + count], taps, bias, out=y[begin:end])
            for length, target in saved:
                if fed < length <= fed + count:
                    pool[target] = rows[length - fed : length - fed + plan.history]
            rows[: plan.history] = rows[count : count + plan.history].clone()
    return y
