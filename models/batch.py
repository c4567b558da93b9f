"""What a model sees of one step: packed tokens, and where their states and pages lie."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from baton.kernels.prefill.chunk_table import ChunkTable

ALIGNMENT = 64  # bytes of a line of a CPU's cache


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
    table: the chunks of the model's chunk_size; None: to be worked out where they are needed.
    """

    offsets: list[int]
    starts: list[int]
    slots: list[int]
    checkpoints: list[StateCheckpoint]
    page_table: Tensor
    table: ChunkTable | None = None

    def saved(self) -> list[tuple[int, int, int]]:
        """The checkpoints as kernels.prefill.chunk_table.cut takes them."""
        return [(c.segment, c.position, c.slot) for c in self.checkpoints]


@dataclass(frozen=True)
class Decode:
    """Rows that feed one token each. slots, positions: int64 [rows]; page_table: int32 [rows, max_pages].

    padding: bool [rows], those that are nobody's; None: there are none.
    """

    slots: Tensor
    positions: Tensor
    page_table: Tensor
    padding: Tensor | None = None


@dataclass(frozen=True)
class PagePlan:
    """Segments of attention: the prefill's, then one of one token for each decode row.

    offsets, starts: int64 [segments + 1] and [segments]. table: int32 [segments, max_pages].
    places: int64 [T], where each token's keys and values go, page · page_size + offset.
    prompts: the first so many segments are of the prefill, none longer than `longest` tokens.
    """

    offsets: Tensor
    starts: Tensor
    table: Tensor
    places: Tensor
    prompts: int
    longest: int


@dataclass(frozen=True)
class Batch:
    """The tokens of one step, packed: prefill segments first, then one token for each decoding row.

    tokens, positions (absolute): int64 [T]. pages: None: to be worked out where they are needed.
    """

    tokens: Tensor
    positions: Tensor
    prefill: Prefill | None
    decode: Decode | None
    pages: PagePlan | None = None


@dataclass(frozen=True)
class Pools:
    """Device memory, one stretch for each slot and for each page: so what is done to all of one is one operation.

    slots: uint8 [slots, bytes]; state: views of it, the state tensors [slots, ...], each contiguous within a slot.
    blocks: uint8 [pages, bytes]; pages: views, the page tensors [pages, page_size, ...], each contiguous within a page.
    """

    slots: Tensor
    blocks: Tensor
    state: list[Tensor]
    pages: list[Tensor]
    page_size: int

    @property
    def nbytes(self) -> int:
        return self.slots.nbytes + self.blocks.nbytes

    def pages_for(self, tokens: int) -> int:
        """How many entries of a page table so many tokens need; 0 without pages."""
        return -(-tokens // self.page_size) if self.pages else 0

    def clear(self, slot: int) -> None:
        self.slots[slot].zero_()

    def poison(self, slot: int) -> None:
        """Fill a slot with NaN, integers with their largest value: whatever is computed from it is wrong."""
        for tensor in self.state:
            tensor[slot].fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)

    def copy(self, source: int, target: int) -> None:
        self.slots[target].copy_(self.slots[source])

    def copy_page(self, source: int, target: int) -> None:
        self.blocks[target].copy_(self.blocks[source])


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
    state, views = stretches(slots, model.state_specs(), device)
    of_pages = [TensorSpec((page_size, *spec.shape), spec.dtype) for spec in model.kv_specs()]
    blocks, page_views = stretches(pages, of_pages, device)
    return Pools(state, blocks, views, page_views, page_size)


def stretches(count: int, specs: list[TensorSpec], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """uint8 [count, bytes], zeroed, and a view of it for each tensor: [count, ...]."""
    sizes = [-(-spec.nbytes // ALIGNMENT) * ALIGNMENT for spec in specs]
    memory = torch.zeros(count, sum(sizes), dtype=torch.uint8, device=device)
    parts = torch.split(memory, sizes, dim=1)
    views = [part[:, : spec.nbytes].view(spec.dtype) for part, spec in zip(parts, specs, strict=True)]
    return memory, [view.view(count, *spec.shape) for view, spec in zip(views, specs, strict=True)]
