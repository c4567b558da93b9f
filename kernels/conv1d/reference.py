"""Depthwise causal convolution with SiLU, over packed segments and one token at a time."""

import torch
from torch import Tensor
from torch.nn import functional as F

from baton.kernels.prefill.convolution import ConvPlan


def conv1d_prefill(x: Tensor, taps: Tensor, bias: Tensor | None, pool: Tensor, plan: ConvPlan) -> Tensor:
    """SiLU of the convolution of packed segments: float32 [T, channels].

    x: [T, channels]; taps: float32 [K, channels], the last one for a token itself; bias: float32 [channels].
    pool: float32 [slots, K-1, channels], the last K-1 inputs of each segment, oldest first; afterwards those at its
    end, and in each checkpoint's slot those at its position.
    """
    rows = torch.empty(len(x) + plan.head_rows.numel(), x.shape[1], dtype=torch.float32, device=x.device)
    rows[plan.head_rows] = pool[plan.slot_index]
    rows[plan.token_rows] = x.float()
    pool[plan.saved_index] = rows[plan.saved_rows]
    return convolve(rows, taps, bias)[plan.token_rows - plan.history]


def conv1d_update(x: Tensor, taps: Tensor, bias: Tensor | None, pool: Tensor, slots: Tensor) -> Tensor:
    """One token for each row: x [rows, channels], slots int64 [rows] → float32 [rows, channels]."""
    rows = torch.cat([pool.index_select(0, slots), x.float()[:, None]], dim=1)
    pool.index_copy_(0, slots, rows[:, 1:])
    return convolve(rows.transpose(0, 1), taps, bias)[0]


def convolve(rows: Tensor, taps: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """SiLU(bias + Σ_k rows[i + k]·taps[k]) for every i at which K rows are left: shifted multiply-adds."""
    count = len(rows) - len(taps) + 1
    y = torch.mul(rows[:count], taps[0], out=out)
    for shift, tap in enumerate(taps[1:], start=1):
        y.addcmul_(rows[shift : shift + count], tap)
    if bias is not None:
        y += bias
    return F.silu(y, inplace=True)
