"""Where a packed prefill's inputs and saved states lie."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class ConvPlan:
    """Segment s is tokens [offsets[s], offsets[s+1]) and its state lies in slots[s].

    saved: (segment, tokens of it, slot), each state to write: those of the checkpoints and of the segments' ends.
    The tensors name rows of the extended input: each segment's `history` inputs from its state, then its tokens.
    """

    offsets: tuple[int, ...]
    slots: tuple[int, ...]
    saved: tuple[tuple[int, int, int], ...]
    history: int
    device: torch.device

    @cached_property
    def head_rows(self) -> Tensor:
        """int64 [segments, history]."""
        return (self._bases[:, None] + torch.arange(self.history)).to(self.device)

    @cached_property
    def token_rows(self) -> Tensor:
        """int64 [T]."""
        lengths = torch.tensor(self.offsets).diff()
        ahead = self.history * torch.arange(1, len(self.slots) + 1)
        return (torch.arange(self.offsets[-1]) + ahead.repeat_interleave(lengths)).to(self.device)

    @cached_property
    def saved_rows(self) -> Tensor:
        """int64 [saved, history]."""
        ends = self._bases[[s for s, _, _ in self.saved]] + torch.tensor([length for _, length, _ in self.saved])
        return (ends[:, None] + torch.arange(self.history)).to(self.device)

    @cached_property
    def slot_index(self) -> Tensor:
        """int64 [segments]."""
        return torch.tensor(self.slots, dtype=torch.int64, device=self.device)

    @cached_property
    def saved_index(self) -> Tensor:
        """int64 [saved]."""
        return torch.tensor([slot for _, _, slot in self.saved], dtype=torch.int64, device=self.device)

    @property
    def _bases(self) -> Tensor:
        """The first row of each segment's part."""
        return torch.tensor(self.offsets[:-1]) + self.history * torch.arange(len(self.slots))


def plan_conv(
    offsets: Sequence[int],
    starts: Sequence[int],
    slots: Sequence[int],
    checkpoints: Sequence[tuple[int, int, int]],
    kernel: int,
    device: torch.device,
) -> ConvPlan:
    """Arguments as in kernels.prefill.scan.plan_chunks; kernel: the width of the convolution."""
    saved = [(segment, position - starts[segment], slot) for segment, position, slot in checkpoints]
    saved += [(segment, offsets[segment + 1] - offsets[segment], slot) for segment, slot in enumerate(slots)]
    return ConvPlan(tuple(offsets), tuple(slots), tuple(saved), kernel - 1, device)
