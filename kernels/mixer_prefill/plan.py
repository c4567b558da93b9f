"""How a packed prefill passes through the mixer."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from kernels.conv1d import ConvPlan, plan_conv
from kernels.ssd import ChunkPlan, plan_chunks


@dataclass(frozen=True)
class ChunkTable:
    """A plan as int64 tensors in the order of the tokens, all contiguous.

    Chunk c is tokens [starts[c], starts[c+1]); slots saved[saves[c]:saves[c+1]] receive the state at its end.
    Segment s is chunks [first[s], first[s+1]), and its state lies in slots[s].
    """

    slots: Tensor
    first: Tensor
    starts: Tensor
    saves: Tensor
    saved: Tensor


@dataclass(frozen=True)
class PrefillPlan:
    """The chunks of the scan, and where the convolution's inputs lie: the same segments, slots and checkpoints."""

    chunks: ChunkPlan
    conv: ConvPlan

    @property
    def tokens(self) -> int:
        return self.chunks.tokens

    @cached_property
    def table(self) -> ChunkTable:
        chunks = sorted(self.chunks.chunks, key=lambda chunk: chunk.begin)
        first = [number for number, chunk in enumerate(chunks) if chunk.begin in self.conv.offsets]
        return ChunkTable(
            _int64(self.conv.slots),
            _int64([*first, len(chunks)]),
            _int64([*(chunk.begin for chunk in chunks), self.tokens]),
            _int64(accumulate((len(chunk.slots) for chunk in chunks), initial=0)),
            _int64(slot for chunk in chunks for slot in chunk.slots),
        )


def plan_prefill(
    offsets: Sequence[int],
    starts: Sequence[int],
    slots: Sequence[int],
    checkpoints: Sequence[tuple[int, int, int]],
    chunk_size: int,
    kernel: int,
    device: torch.device,
) -> PrefillPlan:
    """Arguments as in kernels.ssd.plan_chunks; kernel: the width of the convolution."""
    return PrefillPlan(
        plan_chunks(offsets, starts, slots, checkpoints, chunk_size, device),
        plan_conv(offsets, starts, slots, checkpoints, kernel, device),
    )


def _int64(numbers: Iterable[int]) -> Tensor:
    return torch.tensor(list(numbers), dtype=torch.int64)
