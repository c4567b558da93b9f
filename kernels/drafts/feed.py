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
    """

    begins: Tensor  # int64 [rows + 1]: row r computes the tokens begins[r] to begins[r + 1] of all that are computed
    offsets: Tensor  # int64 [rows + 1]: row r feeds the tokens offsets[r] to offsets[r + 1] of all that are fed
    rings: Tensor  # int64 [rows], all different: the index of each row's ring
    tokens: int  # number of tokens that all rows compute: begins[rows]
    most: int  # most drafts that a row replays or feeds

    @classmethod
    def of(cls, replays: Sequence[int], fed: Sequence[int], rings: Sequence[int]) -> "Drafts":
        """Return the Drafts of rows that replay and feed these numbers of tokens."""
        offsets = torch.tensor([0, *fed]).cumsum(0)
        begins = offsets + torch.tensor([0, *replays]).cumsum(0)
        most = max([0, *replays, *(count - 1 for count in fed)])
        return cls(begins, offsets, torch.tensor(list(rings)), sum(replays) + sum(fed), most)

    @property
    def rows(self) -> list[tuple[int, int, int, int]]:
        """Return for each row how many tokens it replays, its first fed token, the end of these, and its ring."""
        fed, begins, rings = self.offsets.tolist(), self.begins.tolist(), self.rings.tolist()
        return [
            (begins[r + 1] - begins[r] - (fed[r + 1] - fed[r]), fed[r], fed[r + 1], rings[r]) for r in range(len(rings))
        ]
