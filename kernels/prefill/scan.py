"""The chunks of a packed prefill in rounds, each of which holds one chunk of every segment."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from baton.kernels.prefill.chunk_table import ChunkLists, cut


@dataclass(frozen=True)
class ScanChunk:
    """The tokens [begin, end) of the batch, all of one segment."""

    row: int  # the segment's row in ChunkPlan.rows
    begin: int
    end: int
    slots: tuple[int, ...]  # checkpoint slots that receive the state at the chunk's end


@dataclass(frozen=True)
class ChunkPlan:
    """Chunks in rounds: round j holds the j-th chunk of every segment that has one.

    Segments are sorted by their number of chunks, the largest first, so each round works on rows [0, n).
    """

    rows: tuple[int, ...]  # slot of each segment; segments with most chunks first
    rounds: tuple[tuple[ScanChunk, ...], ...]
    tokens: int  # number of tokens of the batch
    device: torch.device

    @cached_property
    def chunks(self) -> tuple[ScanChunk, ...]:
        """All chunks, round by round."""
        return tuple(chunk for chunks in self.rounds for chunk in chunks)

    @cached_property
    def slots(self) -> Tensor:
        """Slot of each segment: int64 [rows]."""
        return torch.tensor(self.rows, dtype=torch.int64, device=self.device)

    @cached_property
    def index(self) -> Tensor:
        """Batch index of each chunk's tokens: int64 [chunks, longest]. A short chunk is padded with its last token."""
        begin, end = self._bounds
        places = torch.arange(int((end - begin).max()))
        return torch.minimum(begin[:, None] + places, end[:, None] - 1).to(self.device)

    @cached_property
    def valid(self) -> Tensor:
        """Whether each entry of `index` is a token: bool [chunks, longest]. False for padding."""
        begin, end = self._bounds
        places = torch.arange(int((end - begin).max()))
        return (begin[:, None] + places < end[:, None]).to(self.device)

    @cached_property
    def place(self) -> Tensor:
        """Index of each token in the flattened `index`, [chunks · longest]: int64 [tokens]."""
        index, valid = self.index.flatten(), self.valid.flatten()
        place = torch.empty(self.tokens, dtype=torch.int64, device=self.device)
        place[index[valid]] = valid.nonzero().squeeze(1)
        return place

    @property
    def _bounds(self) -> tuple[Tensor, Tensor]:
        """First token of each chunk, and the token after its last: int64 [chunks] each, on the host."""
        return torch.tensor([c.begin for c in self.chunks]), torch.tensor([c.end for c in self.chunks])


def plan_chunks(
    offsets: Sequence[int],
    starts: Sequence[int],
    slots: Sequence[int],
    checkpoints: Sequence[tuple[int, int, int]],
    chunk_size: int,
    device: torch.device,
) -> ChunkPlan:
    """Cut segments into chunks, and arrange the chunks in rounds. Arguments: see kernels.prefill.chunk_table.cut."""
    return rounds_of(cut(offsets, starts, slots, checkpoints, chunk_size), device)


def rounds_of(lists: ChunkLists, device: torch.device) -> ChunkPlan:
    """Arrange chunks in rounds."""
    counts = [end - begin for begin, end in pairwise(lists.first)]
    order = sorted(range(len(counts)), key=lambda s: -counts[s])
    rounds = [
        tuple(
            _scan_chunk(lists, row, lists.first[segment] + number)
            for row, segment in enumerate(order)
            if number < counts[segment]
        )
        for number in range(counts[order[0]])
    ]
    return ChunkPlan(tuple(lists.slots[s] for s in order), tuple(rounds), lists.starts[-1], device)


def _scan_chunk(lists: ChunkLists, row: int, chunk: int) -> ScanChunk:
    """Return one chunk of `lists` as a ScanChunk."""
    saved = lists.saved[lists.saves[chunk] : lists.saves[chunk + 1]]
    return ScanChunk(row, lists.starts[chunk], lists.starts[chunk + 1], tuple(saved))
