"""Depthwise causal convolution, with SiLU unless it is left out, over packed segments and one token at a time."""

import torch
from torch import Tensor
from torch.nn import functional as F

from baton.kernels.prefill.convolution import ConvPlan


def conv1d_prefill(
    x: Tensor, taps: Tensor, bias: Tensor | None, pool: Tensor, plan: ConvPlan, activate: bool = True
) -> Tensor:
    """Return SiLU of the causal convolution of packed segments, float32 [T, channels]; update the pool in place.

    x: [T, channels].
    taps: float32 [K, channels]; taps[K-1] multiplies the current token, taps[0] the oldest input.
    bias: float32 [channels] or None.
    pool: float32 [slots, K-1, channels]. A slot holds the last K-1 inputs, oldest first. Each segment's slot is read as
        the history before its first token and receives the inputs at its end. Each checkpoint's slot receives the last
        inputs at the checkpoint's position.
    activate: false leaves SiLU out.
    """
    rows = torch.empty(len(x) + plan.head_rows.numel(), x.shape[1], dtype=torch.float32, device=x.device)
    rows[plan.head_rows] = pool[plan.slot_index]
    rows[plan.token_rows] = x.float()
    pool[plan.saved_index] = rows[plan.saved_rows]
    return convolve(rows, taps, bias, activate=activate)[plan.token_rows - plan.history]


def conv1d_update(
    x: Tensor, taps: Tensor, bias: Tensor | None, pool: Tensor, slots: Tensor, activate: bool = True
) -> Tensor:
    """Advance each row by one token: return float32 [rows, channels], and shift the token into the row's pool slot.

    x: [rows, channels]. slots: int64 [rows], all different. taps, bias, pool and activate: see conv1d_prefill.
    """
    rows = torch.cat([pool.index_select(0, slots), x.float()[:, None]], dim=1)
    pool.index_copy_(0, slots, rows[:, 1:])
    return convolve(rows.transpose(0, 1), taps, bias, activate=activate)[0]


def convolve(
    rows: Tensor, taps: Tensor, bias: Tensor | None, out: Tensor | None = None, activate: bool = True
) -> Tensor:
    """Return SiLU(bias + Σ_k rows[i + k]·taps[k]) for each i with i + K ≤ len(rows), as K shifted multiply-adds.

    rows: float32 [n, ...]. out: the memory of the result, [n - K + 1, ...]. activate: false leaves SiLU out.
    """
    count = len(rows) - len(taps) + 1
    y = torch.mul(rows[:count], taps[0], out=out)
    for shift, tap in enumerate(taps[1:], start=1):
        y.addcmul_(rows[shift : shift + count], tap)
    if bias is not None:
        y += bias
    return F.silu(y, inplace=True) if activate else y
