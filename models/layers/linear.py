"""Projections and embeddings. A checkpoint fills their weights, which may then be packed into a kernel's layout."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from baton.kernels.linear import compressed, dense, int8_activations, per_head, quantized
from baton.kernels.linear.compressed import CompressedWeight
from baton.kernels.linear.dense import PackedWeight
from baton.kernels.linear.per_head import PackedHeads
from baton.kernels.linear.quantized import QuantizedWeight

Packed: TypeAlias = PackedWeight | CompressedWeight | QuantizedWeight
W = TypeVar("W")


@dataclass(frozen=True)
class JoinedWeight:
    """A weight [outputs, inputs] whose outputs are in several forms."""

    parts: tuple[Packed | Tensor, ...]  # in the order of the outputs


class Linear(nn.Module):
    """A projection, x @ weight.T + bias; weight: [outputs, inputs], unless it is packed.

    floats: the number of last outputs whose weights stay floats when the weight is quantized. These are outputs that a
        recurrence or a gate is sensitive to.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool, dtype: torch.dtype, floats: int = 0) -> None:
        super().__init__()
        self.inputs, self.outputs, self.floats, self.dtype = inputs, outputs, floats, dtype
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype)) if bias else None
        self.float_weight: nn.Parameter | None = None  # of the last `floats` outputs, once the others are quantized
        self.packed: Packed | JoinedWeight | None = None

    def forward(self, x: Tensor) -> Tensor:
        return project(x, self.packed or self.weight, self.bias)

    def nothing(self) -> Tensor:
        """Return the projection of no tokens, [0, outputs]."""
        return torch.empty(0, self.outputs, dtype=self.dtype, device=self.weight.device)

    def pack(self, bits: int | None = None) -> None:
        """Replace the loaded weight by its packed form if that is faster, or quantize it to integers of `bits` bits.

        The weights of the last `floats` outputs are never quantized, only packed.
        """
        if bits is None or self.floats == self.outputs:
            self._set(pack(self.weight))
        elif not self.floats:
            self._set(quantized.quantize(self.weight, bits))
        else:
            self._split(self.outputs - self.floats, bits)

    def keep(self, parts: Sequence[QuantizedWeight | Tensor]) -> None:
        """Set the weight from its parts. Some are a file's integers; the others are packed as by `pack`."""
        if len(parts) == 1 and isinstance(parts[0], QuantizedWeight):
            self._set(parts[0])
            return
        packed = tuple(pack(part) or part if isinstance(part, Tensor) else part for part in parts)
        self.packed = JoinedWeight(packed)
        for number, part in enumerate(packed):
            data = nn.Parameter(part if isinstance(part, Tensor) else part.data, requires_grad=False)
            self.register_parameter(f"weight_{number}" if number else "weight", data)

    @property
    def integers(self) -> QuantizedWeight | None:
        """The first quantized part of the weight; None if nothing is quantized."""
        parts = self.packed.parts if isinstance(self.packed, JoinedWeight) else (self.packed,)
        return next((part for part in parts if isinstance(part, QuantizedWeight)), None)

    def round_inputs(self) -> None:
        """Let the quantized parts of the weight round their inputs to integers of 8 bits."""
        if isinstance(self.packed, JoinedWeight):
            self.packed = JoinedWeight(tuple(map(rounding_inputs, self.packed.parts)))
        else:
            self.packed = rounding_inputs(self.packed)

    def _set(self, packed: Packed | None) -> None:
        self.packed = packed
        if packed:
            self.weight = nn.Parameter(packed.data, requires_grad=False)

    def _split(self, count: int, bits: int) -> None:
        """Quantize the weights of the first `count` outputs, and copy the weights of the others."""
        first = quantized.quantize(self.weight[:count], bits)
        last = self.weight[count:].detach().clone()
        packed = pack(last)
        self.float_weight = nn.Parameter(packed.data if packed else last, requires_grad=False)
        self.packed = JoinedWeight((first, packed or last))
        self.weight = nn.Parameter(first.data, requires_grad=False)


class HeadLinear(nn.Module):
    """A separate projection for each head; weight: [heads, outputs, inputs], unless it is packed."""

    def __init__(self, heads: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, outputs, inputs, dtype=dtype))
        self.packed: PackedHeads | None = None

    def forward(self, x: Tensor, passed: int = 0) -> Tensor:
        """Project x [tokens, heads, inputs + passed] to [tokens, heads, outputs + passed].

        The last `passed` numbers of each head are copied unchanged.
        """
        return per_head.head_linear(x, self.packed or self.weight, passed)

    def pack(self, bits: int | None = None) -> None:
        """Pack the weight as Linear.pack does. The weight is never quantized, whatever `bits` is."""
        self.packed = per_head.pack(self.weight)
        if self.packed:
            self.weight = nn.Parameter(self.packed.data, requires_grad=False)


class Embedding(nn.Module):
    """A table of embeddings [vocab, hidden]. A tied table is also the projection from hidden states to logits."""

    def __init__(self, vocab: int, hidden: int, tied: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, hidden, dtype=dtype))
        self.tied = tied
        self.packed: Packed | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        if isinstance(self.packed, QuantizedWeight):
            return quantized.look_up(tokens, self.packed)
        if isinstance(self.packed, CompressedWeight):
            return compressed.look_up(tokens, self.packed)
        table = self.packed if self.packed and self.packed.with_rows else self.weight
        return dense.look_up(tokens, table)

    @property
    def integers(self) -> QuantizedWeight | None:
        """The quantized table; None if it is not quantized."""
        return self.packed if isinstance(self.packed, QuantizedWeight) else None

    def round_inputs(self) -> None:
        """Let `logits` round its inputs to integers of 8 bits if the table is quantized."""
        self.packed = rounding_inputs(self.packed)

    def keep(self, parts: Sequence[QuantizedWeight | Tensor]) -> None:
        """Set the table from one part, which is integers in a file."""
        [part] = parts
        assert isinstance(part, QuantizedWeight)
        self.packed = part
        self.weight = nn.Parameter(part.data, requires_grad=False)

    def logits(self, hidden: Tensor) -> Tensor:
        return project(hidden, self.packed or self.weight, None)

    def pack(self, bits: int | None = None) -> None:
        """Pack a tied table as Linear.pack does, for `logits`.

        The plain table is freed if rows can also be looked up in the packed table.
        """
        self.packed = pack(self.weight, bits) if self.tied else None
        if self.packed and (not isinstance(self.packed, PackedWeight) or self.packed.with_rows):
            self.weight = nn.Parameter(self.packed.data, requires_grad=False)


def rows_by_name(sizes: Mapping[str, int]) -> dict[str, slice]:
    """Return the rows of each projection within one weight that joins several.

    sizes: the number of rows of each projection by its name, in order.
    """
    ends = accumulate(sizes.values())
    return {name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)}


def pack(weight: Tensor, bits: int | None = None) -> Packed | None:
    """Pack or quantize a weight; return None if the plain weight is best."""
    if bits is not None:
        return quantized.quantize(weight, bits)
    return compressed.compress(weight) or dense.pack(weight)


def rounding_inputs(weight: W) -> W:
    """Return the weight such that it rounds its inputs if it is quantized, else the same weight."""
    return replace(weight, rounds_inputs=True) if isinstance(weight, QuantizedWeight) else weight


def project(x: Tensor, weight: Tensor | Packed | JoinedWeight, bias: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias."""
    return project_joined(x, weight, bias) if isinstance(weight, JoinedWeight) else project_one(x, weight, bias)


def project_one(x: Tensor, weight: Tensor | Packed, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias, written to `out` if it is given."""
    if isinstance(weight, QuantizedWeight):
        compute = int8_activations.linear if weight.rounds_inputs else quantized.linear
        return compute(x, weight, bias, out)
    if isinstance(weight, CompressedWeight):
        return compressed.linear(x, weight, bias, out)
    return dense.linear(x, weight, bias, out)


def project_joined(x: Tensor, weight: JoinedWeight, bias: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias. Each part of the weight writes its columns of the result."""
    counts = [len(part) if isinstance(part, Tensor) else part.outputs for part in weight.parts]
    y, end = x.new_empty(len(x), sum(counts)), 0
    for part, count in zip(weight.parts, counts, strict=True):
        start, end = end, end + count
        project_one(x, part, None if bias is None else bias[start:end], y[:, start:end])
    return y
