"""The plan of a packed prefill's convolution: which rows are inputs, and which are saved as states."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class ConvPlan:
    """The rows of an extended input, in which each segment's tokens are preceded by the inputs from its state.

    | history of segment 0 | tokens of segment 0 | history of segment 1 | tokens of segment 1 | ...
    """

    offsets: tuple[int, ...]  # segment s is tokens [offsets[s], offsets[s+1]) of the batch
    slots: tuple[int, ...]  # the slot of each segment's state
    saved: tuple[tuple[int, int, int], ...]  # (segment, number of its tokens, slot) of each state to write, ends too
    history: int  # inputs in a state: the width of the convolution minus 1
    device: torch.device

    @cached_property
    def head_rows(self) -> Tensor:
        """Rows of each segment's history: int64 [segments, history]."""
        return (self._bases[:, None] + torch.arange(self.history)).to(self.device)

    @cached_property
    def token_rows(self) -> Tensor:
        """Row of each token: int64 [T]."""
        lengths = torch.tensor(self.offsets).diff()
        ahead = self.history * torch.arange(1, len(self.slots) + 1)
        return (torch.arange(self.offsets[-1]) + ahead.repeat_interleave(lengths)).to(self.device)

    @cached_property
    def saved_rows(self) -> Tensor:
        """Rows that make up each state to write: int64 [saved, history]."""
        ends = self._bases[[s for s, _, _ in self.saved]] + torch.tensor([length for _, length, _ in self.saved])
        return (ends[:, None] + torch.arange(self.history)).to(self.device)

    @cached_property
    def slot_index(self) -> Tensor:
        """Slot of each segment's state: int64 [segments]."""
        return torch.tensor(self.slots, dtype=torch.int64, device=self.device)

    @cached_property
    def saved_index(self) -> Tensor:
        """Slot that each state is written to: int64 [saved]."""
        return torch.tensor([slot for _, _, slot in self.saved], dtype=torch.int64, device=self.device)

    @property
    def _bases(self) -> Tensor:
        """First row of each segment's history: int64 [segments], on the host."""
        return torch.tensor(self.offsets[:-1]) + self.history * torch.arange(len(self.slots))


def plan_conv(
    offsets: Sequence[int],
    starts: Sequence[int],
    slots: Sequence[int],
    checkpoints: Sequence[tuple[int, int, int]],
    kernel: int,
    device: torch.device,
) -> ConvPlan:
    """Plan the convolution of a packed prefill.

    kernel: the width of the convolution. Other arguments: see kernels.prefill.chunk_table.cut.
    """
    saved = [(segment, position - starts[segment], slot) for segment, position, slot in checkpoints]
    saved += [(segment, offsets[segment + 1] - offsets[segment], slot) for segment, slot in enumerate(slots)]
    return ConvPlan(tuple(offsets), tuple(slots), tuple(saved), kernel - 1, device)
