"""The input of a model in one step: packed tokens, and the places of their states and pages in the pools."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from baton.kernels.drafts import Drafts
from baton.kernels.prefill.chunk_table import ChunkTable
from baton.kernels.runtime.memory import mapped

ALIGNMENT = 64  # bytes of a CPU's cache line


@dataclass(frozen=True)
class StateCheckpoint:
    """An order to copy a prompt's state at `position` into another slot."""

    segment: int  # index of the prompt's segment in the step, see Prefill
    position: int  # tokens of the sequence that the state has consumed
    slot: int  # the slot that receives the copy


@dataclass(frozen=True)
class Prefill:
    """The prompt tokens of a step: one segment per row, packed one after another.

    Before the step, a segment's slot holds the state at the segment's start (zeros at position 0). The step replaces it
    by the state at the segment's end.
    """

    offsets: list[int]  # segment s is tokens[offsets[s]:offsets[s+1]] of the batch
    starts: list[int]  # absolute position of each segment's first token
    slots: list[int]
    checkpoints: list[StateCheckpoint]  # positions are in (start, end] of the segment; `end` copies the final state
    page_table: Tensor  # int32 [segments, max_pages]; entry i: the page of positions [i·page_size, (i+1)·page_size)
    table: ChunkTable | None = None  # the segments cut into chunks of the model's chunk_size; None: cut when needed

    def saved(self) -> list[tuple[int, int, int]]:
        """Return the checkpoints as tuples (segment, position, slot), which kernels take."""
        return [(c.segment, c.position, c.slot) for c in self.checkpoints]


@dataclass(frozen=True)
class Decode:
    """Rows that decode: each feeds one token, or what `drafts` says."""

    slots: Tensor  # int64 [rows]
    positions: Tensor  # int64 [rows], of the first token that each row feeds
    page_table: Tensor  # int32 [rows, max_pages]
    padding: Tensor | None = None  # bool [fed tokens], true for tokens that belong to no request; None: no such tokens
    drafts: Drafts | None = None  # None: no row feeds a draft or has accepted drafts that are not in its state


@dataclass(frozen=True)
class PagePlan:
    """The segments over which attention runs: those of the prefill, then one for each token of decoding rows."""

    offsets: Tensor  # int64 [segments + 1]; segment s is tokens[offsets[s]:offsets[s+1]]
    starts: Tensor  # int64 [segments], absolute position of each segment's first token
    table: Tensor  # int32 [segments, max_pages], see Prefill.page_table
    places: Tensor  # int64 [tokens], flat index of each token's keys and values: page · page_size + offset
    prompts: int  # the number of segments of the prefill, which come first
    longest: int  # an upper bound for the tokens of a prefill segment


@dataclass(frozen=True)
class Batch:
    """The tokens of one step, packed: prefill segments first, then the tokens of each decoding row."""

    tokens: Tensor  # int64 [tokens]
    positions: Tensor  # int64 [tokens], absolute position of each token
    prefill: Prefill | None
    decode: Decode | None
    pages: PagePlan | None = None  # None: the model computes the page plan


@dataclass(frozen=True)
class Pools:
    """Device memory for states and pages.

    Each slot and each page is one contiguous block of memory, so that a single operation clears or copies it.
    """

    slots: Tensor  # uint8 [slots, bytes]
    blocks: Tensor  # uint8 [pages, bytes]
    state: list[Tensor]  # views of `slots`: the state tensors [slots, ...], each contiguous within a slot
    pages: list[Tensor]  # views of `blocks`: the page tensors [pages, page_size, ...], each contiguous within a page
    page_size: int  # tokens
    rings: list[Tensor] = field(default_factory=list)  # by recurrent layer: [rows, drafts, columns], see Drafts

    @property
    def nbytes(self) -> int:
        return self.slots.nbytes + self.blocks.nbytes

    def pages_for(self, tokens: int) -> int:
        """Return how many pages this many tokens need; 0 if the model has no pages."""
        return -(-tokens // self.page_size) if self.pages else 0

    def clear(self, slot: int) -> None:
        self.slots[slot].zero_()

    def poison(self, slot: int) -> None:
        """Fill a slot with NaN (integers with their largest value), so that anything computed from it is wrong."""
        for tensor in self.state:
            tensor[slot].fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)

    def copy(self, source: int, target: int) -> None:
        self.slots[target].copy_(self.slots[source])

    def copy_page(self, source: int, target: int) -> None:
        self.blocks[target].copy_(self.blocks[source])


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of the part of a pool tensor that belongs to one slot, or to one position of a page."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Model(Protocol):
    """The interface between forward and a model."""

    vocab_size: int
    chunk_size: int  # tokens of a chunk, which prefill kernels compute together
    max_position: int  # the longest sequence, in tokens

    def state_specs(self) -> list[TensorSpec]:
        """Return the shape and dtype of each state tensor, for one slot."""
        ...

    def kv_specs(self) -> list[TensorSpec]:
        """Return the shape and dtype of each page tensor, for one position of a page; [] without attention."""
        ...

    def ring_specs(self) -> list[TensorSpec]:
        """Return for each recurrent layer the shape and dtype of what a ring holds of one draft, see Drafts."""
        ...

    def forward(self, batch: Batch, pools: Pools) -> Tensor:
        """Return hidden states [tokens, hidden] after the final norm; update states and pages in place."""
        ...

    def replay(self, rows: Decode, pools: Pools) -> None:
        """Advance the states of rows that feed nothing: replay their accepted drafts. rows: must have `drafts`."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [rows, vocab] for hidden states [rows, hidden]."""
        ...


@runtime_checkable
class PreparingModel(Model, Protocol):
    """A model whose `forward` can be called in two parts. The first one computes no layer."""

    def prepare(self, batch: Batch, pools: Pools) -> Callable[[], Tensor]:
        """Return a function that does `forward` for this batch. Call it before the next `prepare`."""
        ...


@runtime_checkable
class PredictingModel(Model, Protocol):
    """A model that may have a head for multi-token prediction. See models/layers/prediction.py."""

    @property
    def predicts(self) -> bool:
        """Whether the model has a head."""
        ...

    def predict(self, tokens: Tensor, hidden: Tensor, rows: Decode, pools: Pools) -> Tensor:
        """Return estimates of the hidden states after some tokens, [rows, hidden], for `logits`.

        tokens: int64 [rows], each drawn or predicted. hidden: [rows, hidden], the hidden states before the tokens.
        rows: their positions and pages; `slots` are not used.
        """
        ...


def predictor_of(model: Model) -> PredictingModel | None:
    """Return the model if it has a head for multi-token prediction; else None."""
    return model if isinstance(model, PredictingModel) and model.predicts else None


def preparation_of(model: Model) -> Callable[[Batch, Pools], Callable[[], Tensor]]:
    """Return the model's `prepare`. For a model without it, the function leaves all of `forward` for later."""
    if isinstance(model, PreparingModel):
        return model.prepare
    return lambda batch, pools: partial(model.forward, batch, pools)


def allocate(
    model: Model, slots: int, pages: int, page_size: int, device: torch.device, rows: int = 0, drafts: int = 0
) -> Pools:
    """Allocate zeroed pools for `slots` states and `pages` pages. Raises OSError if a CPU has too little memory.

    rows, drafts: how many rows have rings, and for how many drafts each.
    """
    state, views = stretches(slots, model.state_specs(), device)
    page_specs = [TensorSpec((page_size, *spec.shape), spec.dtype) for spec in model.kv_specs()]
    blocks, page_views = stretches(pages, page_specs, device)
    specs = model.ring_specs() if drafts else []
    rings = [torch.zeros(rows, drafts, *spec.shape, dtype=spec.dtype, device=device) for spec in specs]
    return Pools(state, blocks, views, page_views, page_size, rings)


def stretches(count: int, specs: list[TensorSpec], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Allocate `count` contiguous blocks of memory (stretches), each of which holds one tensor of every spec.

    Returns the zeroed memory, uint8 [count, bytes], and a view of it for each spec, [count, *spec.shape]. Each tensor
    begins at a multiple of ALIGNMENT bytes in its stretch.
    """
    sizes = [-(-spec.nbytes // ALIGNMENT) * ALIGNMENT for spec in specs]
    memory = zeros(count * sum(sizes), device).view(count, sum(sizes))
    parts = torch.split(memory, sizes, dim=1)
    views = [part[:, : spec.nbytes].view(spec.dtype) for part, spec in zip(parts, specs, strict=True)]
    return memory, [view.view(count, *spec.shape) for view, spec in zip(views, specs, strict=True)]


def zeros(size: int, device: torch.device) -> Tensor:
    """Return zeroed memory, uint8 [size]. On a CPU it takes memory only from the first write to each of its parts on.

    Raises OSError if a CPU's system refuses this much memory.
    """
    if device.type != "cpu":
        return torch.zeros(size, dtype=torch.uint8, device=device)
    return mapped(size)  # torch.zeros would write to all of it
