"""Causal attention of one segment over latents (MLA), which are expanded into keys and values by head."""

import torch
from torch import Tensor


def attend_by_heads(
    query: Tensor,
    latents: Tensor,
    pages: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    scale: float,
    first: int,
    length: int,
    start: int,
    output: Tensor,
) -> None:
    """Write the attention of one segment to output[first : first + length], in place.

    A head's key at a position is [latent @ key_weight[head], shared key], and its value is value_weight[head] @ latent.
    The token at absolute position p attends to positions 0 to p, whose latents must already be in the pages.

    query: [T, heads, own + shared], the queries of all tokens of the batch.
    latents: [all pages, page_size, 1, rank + shared], a latent and a shared key for each position.
    pages: int [at least as many pages as the segment needs], the pages of the segment's row.
    key_weight: [heads, rank, own]. value_weight: [heads, value, rank].
    first: the segment's first token within the batch. start: that token's absolute position.
    length: the number of the segment's tokens.
    output: [T, heads, value].
    """
    rank, end = key_weight.shape[1], start + length
    needed = pages[: -(-end // latents.shape[1])].long()
    stored = latents[needed].flatten(0, 2)[:end].float()
    latent, shared, rows = stored[:, :rank], stored[:, rank:], slice(first, first + length)
    positions = torch.arange(end, device=query.device)
    is_later = positions > positions[start:, None]
    for head, (to_key, to_value) in enumerate(zip(key_weight.float(), value_weight.float(), strict=True)):
        keys = torch.cat([latent @ to_key, shared], dim=1)
        scores = (query[rows, head].float() @ keys.mT * scale).masked_fill(is_later, float("-inf"))
        output[rows, head] = (scores.softmax(1) @ (latent @ to_value.mT)).to(output.dtype)
