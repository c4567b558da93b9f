"""Weights without initialisation: they come from a checkpoint, and are packed for this CPU after loading."""

import torch
from torch import Tensor, nn

from kernels.linear import PackedWeight, linear, look_up, pack


class Linear(nn.Module):
    """x @ weight.T + bias; weight [outputs, inputs], or packed."""

    def __init__(self, inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype)) if bias else None
        self.packed: PackedWeight | None = None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.packed or self.weight, self.bias)

    def pack(self) -> None:
        """Replace the weight by its packed form where that is faster; the model must have been loaded."""
        self.packed = pack(self.weight)
        if self.packed:
            self.weight = nn.Parameter(self.packed.data, requires_grad=False)


class Embedding(nn.Module):
    """A table [vocab, hidden]; if tied, it is also the projection from hidden states to logits."""

    def __init__(self, vocab: int, hidden: int, tied: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, hidden, dtype=dtype))
        self.tied = tied
        self.packed: PackedWeight | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        table = self.packed if self.packed and self.packed.with_rows else self.weight
        return look_up(tokens, table)

    def logits(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self.packed or self.weight, None)

    def pack(self) -> None:
        """Pack the table for `logits` where that is faster; the plain one goes if rows can be looked up there too."""
        self.packed = pack(self.weight) if self.tied else None
        if self.packed and self.packed.with_rows:
            self.weight = nn.Parameter(self.packed.data, requires_grad=False)
