"""Pooling of a prompt's hidden states: their sum grows chunk by chunk on the device, and their mean is reported."""

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.actors.forward.device import Work
from baton.actors.forward.step.drawing import offsets_of
from baton.actors.forward.step.reporting import to_host
from baton.actors.forward.step.rows import DeviceRow, RowTable
from baton.actors.forward.streams import Stream


@dataclass(frozen=True, slots=True)
class PooledChunk:
    """The hidden states of a chunk that its row's request pools."""

    row: DeviceRow
    first: int  # index of the first of these hidden states in the step's batch
    stop: int  # index after the last one
    count: int  # hidden states that the request pools, in all chunks
    completes: bool  # whether these are the last of them

    def enqueue(self, hidden: Tensor, stream: Stream) -> Tensor | None:
        """Enqueue the addition to the row's sum. Return the mean, float32 in host memory, if the sum is complete.

        The sum is float64, so that the mean hardly depends on how the prompt was cut into chunks.

        hidden: the hidden states of the step's batch.
        """
        part = hidden[self.first : self.stop].sum(0, dtype=torch.float64)
        total = part if self.row.pooled is None else self.row.pooled + part
        self.row.pooled = None if self.completes else total
        return to_host((total / self.count).float(), stream) if self.completes else None


def pooled_chunks(work: Work, table: RowTable) -> list[PooledChunk]:
    """Return what the step's chunks add to the sums of their rows."""
    found = []
    for chunk, offset in offsets_of(work):
        row = table[chunk.row]
        # A row that was admitted with output has reported the mean with its first token.
        if row.request.pooled is None or len(row.tokens) > row.request.prompt_len:
            continue
        begin, end = row.request.pooled
        first, stop = max(begin, chunk.start), min(end, chunk.stop)
        if first < stop:
            places = offset + first - chunk.start, offset + stop - chunk.start
            found.append(PooledChunk(row, *places, end - begin, stop == end))
    return found
