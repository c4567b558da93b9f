"""The tokens that decoding rows compute, where rows also feed drafts."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MOST_DRAFTS = 16
"""Maximum drafts of a row in a step; also in feed.h."""


@dataclass(frozen=True)
class Drafts:
    """The tokens of decoding rows, if any row feeds a draft or has accepted drafts.

    A row computes three kinds of tokens, in this order:
    - accepted drafts of the row's last step, which are *replayed*: their inputs are in the row's ring;
    - its next token, after which its state is stored, unless the row feeds nothing;
    - new drafts, which continue on a copy of the state, and whose inputs go into the ring.

    A *ring* has room for the inputs of K drafts of one row in one layer. "Inputs" are the columns of the layer's
    projections that decide its state.

    A captured step has fixed numbers of rows and of tokens, which only the device's `begins` and `offsets` limit:
    - More tokens may be fed than offsets[rows]. The rest belongs to no row, and its outputs are meaningless.
    - `tokens` may exceed begins[rows].
    - Several padding rows may share a slot and a ring, whose contents are meaningless. A padding row replays nothing,
      and feeds one token at most.
    Only kernels in Triton take such Drafts; other forms read the numbers on the host.
    """

    begins: Tensor  # int64 [rows + 1]: row r computes the tokens begins[r] to begins[r + 1] of all that are computed
    offsets: Tensor  # int64 [rows + 1]: row r feeds the tokens offsets[r] to offsets[r + 1] of all that are fed
    rings: Tensor  # int64 [rows], all different except padding rows': the index of each row's ring
    tokens: int  # number of tokens that all rows compute, begins[rows]; in a captured step at least as many
    most: int  # most drafts that a row replays or feeds; in a captured step at least as many

    @classmethod
    def of(
        cls,
        replays: Sequence[int],
        fed: Sequence[int],
        rings: Sequence[int],
        device: torch.device | None = None,
    ) -> "Drafts":
        """Return the Drafts of rows that replay and feed these numbers of tokens. device: of the tensors; None: CPU."""
        offsets = torch.tensor([0, *fed]).cumsum(0)
        begins = offsets + torch.tensor([0, *replays]).cumsum(0)
        most = max([0, *replays, *(count - 1 for count in fed)])
        indices = torch.tensor(list(rings), dtype=torch.int64, device=device)
        return cls(begins.to(device), offsets.to(device), indices, sum(replays) + sum(fed), most)

    @property
    def rows(self) -> list[tuple[int, int, int, int]]:
        """Return for each row how many tokens it replays, its first fed token, the end of these, and its ring."""
        fed, begins, rings = self.offsets.tolist(), self.begins.tolist(), self.rings.tolist()
        return [
            (begins[r + 1] - begins[r] - (fed[r + 1] - fed[r]), fed[r], fed[r + 1], rings[r]) for r in range(len(rings))
        ]


def check_ring(drafts: Drafts, ring: Tensor | None, columns: int, dtype: torch.dtype) -> Tensor:
    """Return the ring, [rings, K, columns]. Raise ValueError unless it has this form and the drafts fit in it."""
    if ring is None or ring.dtype != dtype or ring.shape[2] != columns or ring.shape[1] > MOST_DRAFTS:
        found = "no ring" if ring is None else f"a ring {tuple(ring.shape)} of {ring.dtype}"
        raise ValueError(f"{found} for inputs of {columns} in {dtype}")
    if drafts.most > ring.shape[1]:
        raise ValueError(f"{drafts.most} drafts of a row in a ring for {ring.shape[1]}")
    if not ring.is_contiguous():
        raise ValueError("the ring must be contiguous")
    return ring
