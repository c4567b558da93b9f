"""The plan of a packed prefill: its segments, their chunks, and the plans of the references."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from baton.kernels.prefill.chunk_table import ChunkTable, chunk_table, cut
from baton.kernels.prefill.convolution import ConvPlan, plan_conv
from baton.kernels.prefill.scan import ChunkPlan, rounds_of


@dataclass(frozen=True)
class PrefillPlan:
    """The segments of a packed prefill, with their slots, checkpoints and chunks.

    The plans that only the references and torch's forms need are made on first use.
    """

    offsets: Sequence[int]  # offsets, starts, slots, checkpoints: see kernels.prefill.chunk_table.cut
    starts: Sequence[int]
    slots: Sequence[int]
    checkpoints: Sequence[tuple[int, int, int]]
    kernel: int  # width of the convolution
    table: ChunkTable  # the chunks, on the model's device

    @property
    def tokens(self) -> int:
        """The number of tokens of the batch."""
        return self.offsets[-1]

    @cached_property
    def chunks(self) -> ChunkPlan:
        """The chunks in rounds."""
        return rounds_of(self.table.lists, self.table.slots.device)

    @cached_property
    def conv(self) -> ConvPlan:
        """The plan of the convolution."""
        segments = (self.offsets, self.starts, self.slots, self.checkpoints)
        return plan_conv(*segments, self.kernel, self.table.slots.device)


def plan_prefill(
    offsets: Sequence[int],
    starts: Sequence[int],
    slots: Sequence[int],
    checkpoints: Sequence[tuple[int, int, int]],
    chunk_size: int,
    kernel: int,
    device: torch.device,
) -> PrefillPlan:
    """Plan a packed prefill.

    kernel: the width of the convolution. device: the model's. Other arguments: see kernels.prefill.chunk_table.cut.
    """
    table = chunk_table(cut(offsets, starts, slots, checkpoints, chunk_size), device)
    return PrefillPlan(offsets, starts, slots, checkpoints, kernel, table)
