"""How a packed prefill passes through the mixer."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from baton.kernels.prefill.chunk_table import ChunkTable, chunk_table, cut
from baton.kernels.prefill.convolution import ConvPlan, plan_conv
from baton.kernels.prefill.scan import ChunkPlan, rounds_of


@dataclass(frozen=True)
class PrefillPlan:
    """Segments with their slots and checkpoints, as kernels.prefill.chunk_table.cut takes them, and their chunks.

    kernel: the width of the convolution. table: the chunks where the model computes. What the references want to know
    besides is worked out when they ask.
    """

    offsets: Sequence[int]
    starts: Sequence[int]
    slots: Sequence[int]
    checkpoints: Sequence[tuple[int, int, int]]
    kernel: int
    table: ChunkTable

    @property
    def tokens(self) -> int:
        return self.offsets[-1]

    @cached_property
    def chunks(self) -> ChunkPlan:
        return rounds_of(self.table.lists, self.table.slots.device)

    @cached_property
    def conv(self) -> ConvPlan:
        given = (self.offsets, self.starts, self.slots, self.checkpoints)
        return plan_conv(*given, self.kernel, self.table.slots.device)


def plan_prefill(
    offsets: Sequence[int],
    starts: Sequence[int],
    slots: Sequence[int],
    checkpoints: Sequence[tuple[int, int, int]],
    chunk_size: int,
    kernel: int,
    device: torch.device,
) -> PrefillPlan:
    """Arguments as in kernels.prefill.chunk_table.cut; kernel: the width of the convolution."""
    table = chunk_table(cut(offsets, starts, slots, checkpoints, chunk_size), device)
    return PrefillPlan(offsets, starts, slots, checkpoints, kernel, table)
