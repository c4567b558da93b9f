"""How a packed prefill is cut into chunks."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

LONGEST = 64


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
    """Cut segments into chunks whose boundaries lie at absolute multiples of chunk_size and at checkpoints.

    Segment s is tokens [offsets[s], offsets[s+1]), the first at absolute position starts[s]; its state lives in
    slots[s]. checkpoints: (segment, absolute position in (start, end], slot). A chunk_size above 64 is divided
    further, counting from each absolute multiple. ValueError for an empty segment or a position outside its segment.
    """
    wanted: list[dict[int, list[int]]] = [{} for _ in slots]
    for segment, position, slot in checkpoints:
        end = starts[segment] + offsets[segment + 1] - offsets[segment]
        if not starts[segment] < position <= end:
            raise ValueError(f"checkpoint at {position} lies outside ({starts[segment]}, {end}] of segment {segment}")
        wanted[segment].setdefault(position, []).append(slot)

    cuts = [
        _boundaries(start, start + offsets[s + 1] - offsets[s], wanted[s], chunk_size) for s, start in enumerate(starts)
    ]
    order = sorted(range(len(cuts)), key=lambda s: -len(cuts[s]))
    rounds = [
        tuple(
            ScanChunk(
                row,
                offsets[s] + cuts[s][number] - starts[s],
                offsets[s] + cuts[s][number + 1] - starts[s],
                tuple(wanted[s].get(cuts[s][number + 1], ())),
            )
            for row, s in enumerate(order)
            if number + 1 < len(cuts[s])
        )
        for number in range(len(cuts[order[0]]) - 1)
    ]
    return ChunkPlan(tuple(slots[s] for s in order), tuple(rounds), offsets[-1], device)


def _boundaries(start: int, end: int, wanted: dict[int, list[int]], chunk_size: int) -> list[int]:
    """Absolute positions start = b0 < b1 < … = end."""
    if end <= start:
        raise ValueError(f"a segment from {start} to {end} holds no tokens")
    step = -(-chunk_size // -(-chunk_size // LONGEST))
    grid = set(wanted)
    for base in range(start // chunk_size * chunk_size, end, chunk_size):
        grid.update(range(base, min(base + chunk_size, end), step))
    return sorted({start, end, *(b for b in grid if start < b < end)})
