"""How a packed prefill is cut into chunks: on the host, and as tensors for kernels."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

LONGEST = 64


class ChunkLists(NamedTuple):
    """The fields of ChunkTable that are tensors there."""

    slots: list[int]
    first: list[int]
    starts: list[int]
    owner: list[int]
    saves: list[int]
    saved: list[int]

    @property
    def longest(self) -> int:
        """Most tokens of a chunk."""
        return max(end - begin for begin, end in pairwise(self.starts))


@dataclass(frozen=True)
class ChunkTable:
    """int64, contiguous, in the order of tokens. Chunks are cut at absolute multiples of a size, and at checkpoints.

    slots [segments]: where each segment's state lies. Segment s is chunks [first[s], first[s+1]); first [segments + 1].
    Chunk c is tokens [starts[c], starts[c+1]) of the batch, of segment owner[c]; starts [chunks + 1], owner [chunks].
    Slots saved[saves[c]:saves[c+1]] receive the state at its end, as the segment's own does at the end of its last;
    saves [chunks + 1]. No slot is named twice. lists: the same, on the host.
    """

    lists: ChunkLists
    slots: Tensor
    first: Tensor
    starts: Tensor
    owner: Tensor
    saves: Tensor
    saved: Tensor

    @property
    def longest(self) -> int:
        return self.lists.longest

    @property
    def segments(self) -> int:
        return len(self.slots)

    @property
    def chunks(self) -> int:
        return len(self.owner)


def cut(
    offsets: Sequence[int],
    starts: Sequence[int],
    slots: Sequence[int],
    checkpoints: Sequence[tuple[int, int, int]],
    chunk_size: int,
) -> ChunkLists:
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
    lists = ChunkLists(list(slots), [0], [0], [], [0], [])
    for segment, (start, offset) in enumerate(zip(starts, offsets, strict=False)):
        for end in _ends(start, start + offsets[segment + 1] - offset, wanted[segment], chunk_size):
            lists.saved.extend(wanted[segment].get(end, ()))
            lists.starts.append(offset + end - start)
            lists.owner.append(segment)
            lists.saves.append(len(lists.saved))
        lists.first.append(len(lists.owner))
    return lists


def chunk_table(lists: ChunkLists, device: torch.device) -> ChunkTable:
    return ChunkTable(lists, *[torch.tensor(numbers, dtype=torch.int64, device=device) for numbers in lists])


def _ends(start: int, end: int, wanted: dict[int, list[int]], chunk_size: int) -> list[int]:
    """The absolute positions at which the chunks of a segment end."""
    if end <= start:
        raise ValueError(f"a segment from {start} to {end} holds no tokens")
    step = -(-chunk_size // -(-chunk_size // LONGEST))
    grid = {end, *wanted}
    for base in range(start // chunk_size * chunk_size, end, chunk_size):
        grid.update(range(base, min(base + chunk_size, end), step))
    return sorted(position for position in grid if position > start)
