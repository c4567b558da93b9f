"""Weights without initialisation: they come from a checkpoint.

On a CPU, bfloat16 weights are packed after loading into oneDNN's blocked layout: a step of few rows then takes about
half the time, for plain ones are re-ordered at each call.
"""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Linear(nn.Module):
    """x @ weight.T + bias; weight [outputs, inputs]."""

    def __init__(self, inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return project(x, self.weight, self.bias)

    def pack(self) -> None:
        """Replace the weight by its packed form where that is faster; the model must have been loaded."""
        if can_pack(self.weight):
            self.weight = nn.Parameter(packed(self.weight), requires_grad=False)


class Embedding(nn.Module):
    """A table [vocab, hidden]; if tied, it is also the projection from hidden states to logits."""

    def __init__(self, vocab: int, hidden: int, tied: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, hidden, dtype=dtype))
        self.tied = tied
        self.head: Tensor | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)

    def logits(self, hidden: Tensor) -> Tensor:
        return project(hidden, self.weight if self.head is None else self.head, None)

    def pack(self) -> None:
        """Keep a packed copy for `logits` where that is faster; the model must have been loaded."""
        if self.tied and can_pack(self.weight):
            self.head = packed(self.weight)


def project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias, for a plain or a packed weight."""
    if weight.is_mkldnn:
        return cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], ""))
    return F.linear(x, weight, bias)


def can_pack(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch._C._has_mkldnn
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def packed(weight: Tensor, rows: int = 16) -> Tensor:
    """rows: the number of tokens to lay it out for."""
    return cast(Tensor, torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows))
