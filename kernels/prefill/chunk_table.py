"""The chunks of a packed prefill: cut on the host, and passed to kernels as tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

LONGEST = 64
"""Maximum tokens of a chunk."""


class ChunkLists(NamedTuple):
    """The chunks of a packed prefill, in the order of tokens. No slot is named twice.

    Chunks are cut at absolute multiples of a chunk size, and at checkpoints:

        segment s = chunks [first[s], first[s+1])
        chunk c   = tokens [starts[c], starts[c+1]) of the batch, all of segment owner[c]
        the state at the end of chunk c is written to the slots saved[saves[c]:saves[c+1]]
    """

    slots: list[int]  # [segments], the slot of each segment's state, which also receives the state at the segment's end
    first: list[int]  # [segments + 1]
    starts: list[int]  # [chunks + 1]
    owner: list[int]  # [chunks]
    saves: list[int]  # [chunks + 1]
    saved: list[int]  # [checkpoints]

    @property
    def longest(self) -> int:
        """The number of tokens of the longest chunk."""
        return max(end - begin for begin, end in pairwise(self.starts))


@dataclass(frozen=True)
class ChunkTable:
    """ChunkLists on the device: contiguous int64 tensors with the meanings and shapes that ChunkLists describes."""

    lists: ChunkLists  # the same numbers, on the host
    slots: Tensor
    first: Tensor
    starts: Tensor
    owner: Tensor
    saves: Tensor
    saved: Tensor

    @property
    def longest(self) -> int:
        """The number of tokens of the longest chunk."""
        return self.lists.longest

    @property
    def segments(self) -> int:
        """The number of segments."""
        return len(self.slots)

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return len(self.owner)


def cut(
    offsets: Sequence[int],
    starts: Sequence[int],
    slots: Sequence[int],
    checkpoints: Sequence[tuple[int, int, int]],
    chunk_size: int,
) -> ChunkLists:
    """Cut segments into chunks whose boundaries lie at absolute multiples of chunk_size and at checkpoints.

    Boundaries are at absolute positions, so a prompt that is fed in steps which end at multiples of chunk_size has the
    same chunks as in one step. Raise ValueError for an empty segment, or for a checkpoint outside its segment.

    offsets: [segments + 1]; segment s is tokens [offsets[s], offsets[s+1]) of the batch.
    starts: the absolute position of each segment's first token.
    slots: the slot of each segment's state.
    checkpoints: (segment, absolute position in (start, end], slot) for each state to keep.
    chunk_size: tokens. A size above 64 is divided into equal parts, counted from each absolute multiple.
    """
    slots_at: list[dict[int, list[int]]] = [{} for _ in slots]
    for segment, position, slot in checkpoints:
        end = starts[segment] + offsets[segment + 1] - offsets[segment]
        if not starts[segment] < position <= end:
            raise ValueError(f"checkpoint at {position} lies outside ({starts[segment]}, {end}] of segment {segment}")
        slots_at[segment].setdefault(position, []).append(slot)
    lists = ChunkLists(list(slots), [0], [0], [], [0], [])
    for segment, (start, offset) in enumerate(zip(starts, offsets, strict=False)):
        for end in _ends(start, start + offsets[segment + 1] - offset, slots_at[segment], chunk_size):
            lists.saved.extend(slots_at[segment].get(end, ()))
            lists.starts.append(offset + end - start)
            lists.owner.append(segment)
            lists.saves.append(len(lists.saved))
        lists.first.append(len(lists.owner))
    return lists


def chunk_table(lists: ChunkLists, device: torch.device) -> ChunkTable:
    """Copy the lists to tensors on the device."""
    return ChunkTable(lists, *[torch.tensor(numbers, dtype=torch.int64, device=device) for numbers in lists])


def _ends(start: int, end: int, slots_at: dict[int, list[int]], chunk_size: int) -> list[int]:
    """Return the absolute positions at which the chunks of the segment [start, end) end, in ascending order.

    slots_at: the slots of the segment's checkpoints by absolute position.
    """
    if end <= start:
        raise ValueError(f"a segment from {start} to {end} holds no tokens")
    step = -(-chunk_size // -(-chunk_size // LONGEST))
    grid = {end, *slots_at}
    for base in range(start // chunk_size * chunk_size, end, chunk_size):
        grid.update(range(base, min(base + chunk_size, end), step))
    return sorted(position for position in grid if position > start)
