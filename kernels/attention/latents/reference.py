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
    latent, shared = stored[:, :rank], stored[:, rank:]
    own = torch.einsum("pr,hro->hpo", latent, key_weight.float())
    keys = torch.cat([own, shared.expand(len(own), -1, -1)], dim=2)
    values = torch.einsum("pr,hvr->hpv", latent, value_weight.float())
    rows = slice(first, first + length)
    scores = torch.einsum("thd,hpd->htp", query[rows].float(), keys) * scale
    positions = torch.arange(end, device=query.device)
    hidden = positions > positions[start:, None]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    output[rows] = torch.einsum("htp,hpv->thv", weights, values).to(output.dtype)
