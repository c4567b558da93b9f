"""What a model sees of one step: packed tokens, and where their states and pages lie."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class StateCheckpoint:
    """Copy the state of prefill segment `segment` after `position` tokens (absolute) into `slot`."""

    segment: int
    position: int
    slot: int


@dataclass(frozen=True)
class Prefill:
    """The prompt chunks of a step, packed: segment s is tokens[offsets[s]:offsets[s+1]] of the batch.

    starts: absolute position of each segment's first token. Its slot holds the state at that position (zeros at 0) and
    receives the state at its end. A checkpoint lies in (start, end]; the one at the end is a copy of the final state.
    page_table: int32 [segments, max_pages]; entry i names the page of positions [i·page_size, (i+1)·page_size).
    """

    offsets: list[int]
    starts: list[int]
    slots: list[int]
    checkpoints: list[StateCheckpoint]
    page_table: Tensor


@dataclass(frozen=True)
class Decode:
    """Rows that feed one token each. slots, positions: int64 [rows]; page_table: int32 [rows, max_pages]."""

    slots: Tensor
    positions: Tensor
    page_table: Tensor


@dataclass(frozen=True)
class Batch:
    """The tokens of one step, packed: prefill segments first, then one token for each decoding row.

    tokens, positions (absolute): int64 [T].
    """

    tokens: Tensor
    positions: Tensor
    prefill: Prefill | None
    decode: Decode | None


@dataclass(frozen=True)
class Pools:
    """Device memory by slot and by page: state tensors [slots, ...], page tensors [pages, page_size, ...]."""

    state: list[Tensor]
    pages: list[Tensor]
    page_size: int

    def clear(self, slot: int) -> None:
        for tensor in self.state:
            tensor[slot].zero_()

    def poison(self, slot: int) -> None:
        """Fill a slot with NaN, integers with their largest value: whatever is computed from it is wrong."""
        for tensor in self.state:
            tensor[slot].fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)

    def copy(self, source: int, target: int) -> None:
        for tensor in self.state:
            tensor[target].copy_(tensor[source])

    def copy_page(self, source: int, target: int) -> None:
        for tensor in self.pages:
            tensor[target].copy_(tensor[source])


@dataclass(frozen=True)
class TensorSpec:
    """TensorSpec of one slot's or one KV position's share of a pool tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Model(Protocol):
    """What forward asks of a family."""

    vocab_size: int
    chunk_size: int
    max_position: int

    def state_specs(self) -> list[TensorSpec]:
        """One entry per state tensor: what a slot holds."""
        ...

    def kv_specs(self) -> list[TensorSpec]:
        """One entry per page tensor: what one position of a page holds. Empty without attention."""
        ...

    def forward(self, batch: Batch, pools: Pools) -> Tensor:
        """Hidden states [T, hidden] after the final norm; updates states and pages in place."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [rows, vocab] of hidden states [rows, hidden]."""
        ...


def allocate(model: Model, slots: int, pages: int, page_size: int, device: torch.device) -> Pools:
    """Zeroed pools for `slots` states and `pages` pages."""
    state = [torch.zeros(slots, *s.shape, dtype=s.dtype, device=device) for s in model.state_specs()]
    kv = [torch.zeros(pages, page_size, *s.shape, dtype=s.dtype, device=device) for s in model.kv_specs()]
    return Pools(state, kv, page_size)
