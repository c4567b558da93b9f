"""The chunks of a packed prefill in rounds: one of each segment at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from baton.kernels.prefill.chunk_table import ChunkLists, cut


@dataclass(frozen=True)
class ScanChunk:
    """Tokens [begin, end) of the batch, all of one segment. `slots` receive the state at the chunk's end."""

    row: int
    begin: int
    end: int
    slots: tuple[int, ...]


@dataclass(frozen=True)
class ChunkPlan:
    """Chunks in rounds: round j holds the j-th chunk of every segment that has one.

    rows: the pool slot of each row; row 0 is the segment with the most chunks, so round j works on rows [0, n).
    """

    rows: tuple[int, ...]
    rounds: tuple[tuple[ScanChunk, ...], ...]
    tokens: int
    device: torch.device

    @cached_property
    def chunks(self) -> tuple[ScanChunk, ...]:
        return tuple(chunk for chunks in self.rounds for chunk in chunks)

    @cached_property
    def slots(self) -> Tensor:
        """int64 [rows]."""
        return torch.tensor(self.rows, dtype=torch.int64, device=self.device)

    @cached_property
    def index(self) -> Tensor:
        """int64 [chunks, longest]: the token at each place; a short chunk repeats its own last token."""
        begin, end = self._bounds
        places = torch.arange(int((end - begin).max()))
        return torch.minimum(begin[:, None] + places, end[:, None] - 1).to(self.device)

    @cached_property
    def valid(self) -> Tensor:
        """bool [chunks, longest]: false where `index` repeats."""
        begin, end = self._bounds
        places = torch.arange(int((end - begin).max()))
        return (begin[:, None] + places < end[:, None]).to(self.device)

    @cached_property
    def place(self) -> Tensor:
        """int64 [tokens]: where in the flattened [chunks · longest] each token stands."""
        index, valid = self.index.flatten(), self.valid.flatten()
        place = torch.empty(self.tokens, dtype=torch.int64, device=self.device)
        place[index[valid]] = valid.nonzero().squeeze(1)
        return place

    @property
    def _bounds(self) -> tuple[Tensor, Tensor]:
        return torch.tensor([c.begin for c in self.chunks]), torch.tensor([c.end for c in self.chunks])


def plan_chunks(
    offsets: Sequence[int],
    starts: Sequence[int],
    slots: Sequence[int],
    checkpoints: Sequence[tuple[int, int, int]],
    chunk_size: int,
    device: torch.device,
) -> ChunkPlan:
    """See kernels.prefill.chunk_table.cut."""
    return rounds_of(cut(offsets, starts, slots, checkpoints, chunk_size), device)


def rounds_of(lists: ChunkLists, device: torch.device) -> ChunkPlan:
    """The same chunks in rounds."""
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
    saved = lists.saved[lists.saves[chunk] : lists.saves[chunk + 1]]
    return ScanChunk(row, lists.starts[chunk], lists.starts[chunk + 1], tuple(saved))
