"""Weights without initialisation: they come from a checkpoint, and are packed for this CPU after loading."""

import torch
from torch import Tensor, nn

from baton.kernels.linear import dense, per_head, quantized
from baton.kernels.linear.dense import PackedWeight
from baton.kernels.linear.per_head import PackedHeads
from baton.kernels.linear.quantized import QuantizedWeight


class Linear(nn.Module):
    """x @ weight.T + bias; weight [outputs, inputs], or packed."""

    def __init__(self, inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype)) if bias else None
        self.packed: PackedWeight | QuantizedWeight | None = None

    def forward(self, x: Tensor) -> Tensor:
        return project(x, self.packed or self.weight, self.bias)

    def pack(self, bits: int | None = None) -> None:
        """Replace the weight by its packed form where that is faster, or by integers of `bits` bits.

        The model must have been loaded.
        """
        self.packed = pack(self.weight, bits)
        if self.packed:
            self.weight = nn.Parameter(self.packed.data, requires_grad=False)


class HeadLinear(nn.Module):
    """A projection of each head's own: weight [heads, outputs, inputs], or packed."""

    def __init__(self, heads: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, outputs, inputs, dtype=dtype))
        self.packed: PackedHeads | None = None

    def forward(self, x: Tensor, passed: int = 0) -> Tensor:
        """x: [T, heads, inputs or more]; the `passed` numbers behind the inputs follow the outputs as they are."""
        return per_head.head_linear(x, self.packed or self.weight, passed)

    def pack(self, bits: int | None = None) -> None:
        """See Linear.pack; whatever the bits, numbers are kept."""
        self.packed = per_head.pack(self.weight)
        if self.packed:
            self.weight = nn.Parameter(self.packed.data, requires_grad=False)


class Embedding(nn.Module):
    """A table [vocab, hidden]; if tied, it is also the projection from hidden states to logits."""

    def __init__(self, vocab: int, hidden: int, tied: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, hidden, dtype=dtype))
        self.tied = tied
        self.packed: PackedWeight | QuantizedWeight | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        if isinstance(self.packed, QuantizedWeight):
            return quantized.look_up(tokens, self.packed)
        table = self.packed if self.packed and self.packed.with_rows else self.weight
        return dense.look_up(tokens, table)

    def logits(self, hidden: Tensor) -> Tensor:
        return project(hidden, self.packed or self.weight, None)

    def pack(self, bits: int | None = None) -> None:
        """Pack the table for `logits`, see Linear.pack; the plain one goes if rows can be looked up there too."""
        self.packed = pack(self.weight, bits) if self.tied else None
        if self.packed and (isinstance(self.packed, QuantizedWeight) or self.packed.with_rows):
            self.weight = nn.Parameter(self.packed.data, requires_grad=False)


def pack(weight: Tensor, bits: int | None) -> PackedWeight | QuantizedWeight | None:
    """None where the plain weight is best."""
    return dense.pack(weight) if bits is None else quantized.quantize(weight, bits)


def project(x: Tensor, weight: Tensor | PackedWeight | QuantizedWeight, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias."""
    if isinstance(weight, QuantizedWeight):
        return quantized.linear(x, weight, bias)
    return dense.linear(x, weight, bias)
