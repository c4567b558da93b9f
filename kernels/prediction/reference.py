"""The operations in torch."""

import torch
from torch import Tensor

from baton.kernels.drafts import Drafts


def exchange_hidden(
    hidden: Tensor, states: Tensor, slots: Tensor, drafts: Drafts | None = None, ring: Tensor | None = None
) -> Tensor:
    """Return the hidden state before each token of decoding rows, like `hidden`, and store the tokens' own ones.

    The hidden state of a row's next token is stored in `states`, and those of its drafts in the ring. If a row feeds
    nothing, the hidden state of its last accepted draft is copied from the ring to `states`.

    hidden: [fed tokens, size]. states: [slots, size], in the same dtype. slots: int64 [rows], all different.
    drafts, ring [rings, K, size]: of the rows, see Drafts; None: each row feeds one token.
    """
    before = states[slots]
    if drafts is None or ring is None:
        states[slots] = hidden
        return before
    fed, computed = drafts.offsets.diff(), drafts.begins.diff()
    # Accepted drafts are not in the slot's state yet: the hidden state of the last one is in the ring.
    replayed = computed - fed
    of_ring = ring[drafts.rings, (replayed - 1).clamp(min=0)]
    before = torch.where(replayed[:, None] > 0, of_ring, before)
    feeding = fed > 0
    first = drafts.offsets[:-1][feeding]
    states[slots] = before
    states[slots[feeding]] = hidden[first]
    row = torch.repeat_interleave(torch.arange(len(slots), device=fed.device), fed)
    number = torch.arange(len(hidden), device=fed.device) - drafts.offsets[row]
    is_draft = number > 0
    ring[drafts.rings[row[is_draft]], number[is_draft] - 1] = hidden[is_draft]
    result = torch.cat([hidden[:1], hidden[:-1]])
    result[first] = before[feeding]
    return result


def join(left: Tensor, right: Tensor) -> Tensor:
    """Return the rows of two tensors of one shape and dtype side by side: [rows, 2 · size]."""
    return torch.cat((left, right), 1)
