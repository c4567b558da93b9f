"""Causal grouped-query attention over paged keys and values."""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F


def write_pages(keys: Tensor, values: Tensor, key_pages: Tensor, value_pages: Tensor, places: Tensor) -> None:
    """Store keys, values [T, kv_heads, head_dim] at places int64 [T] = page · page_size + offset."""
    page, offset = places // key_pages.shape[1], places % key_pages.shape[1]
    key_pages[page, offset] = keys.to(key_pages.dtype)
    value_pages[page, offset] = values.to(value_pages.dtype)


def paged_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    offsets: Tensor,
    starts: Tensor,
    scale: float,
) -> Tensor:
    """Let each segment attend to its pages up to each of its own tokens, whose keys have been written already.

    query: [T, heads, head_dim]. offsets, starts: int64 [segments + 1] and [segments], on the host: segment s is
    [offsets[s], offsets[s+1]) and its first token stands at starts[s]; a decode row is a segment of one token.
    key_pages: [pages, page_size, kv_heads, head_dim]; value_pages: [pages, page_size, kv_heads, value_dim], which may
    be the first columns of wider pages; value_dim is at most head_dim. page_table: int [segments, max_pages]. Reads no
    entry beyond a segment's end. Returns [T, heads, value_dim]; ValueError for pages that do not fit.
    """
    check_fit(query, key_pages, value_pages)
    page_size = key_pages.shape[1]
    output = query.new_empty(*query.shape[:2], value_pages.shape[3])
    for segment, (start, (begin, stop)) in enumerate(zip(starts.tolist(), pairwise(offsets.tolist()), strict=True)):
        rows = slice(begin, stop)
        end = start + rows.stop - rows.start
        pages = page_table[segment, : -(-end // page_size)].long()
        keys = key_pages[pages].flatten(0, 1)[:end].transpose(0, 1)
        values = value_pages[pages].flatten(0, 1)[:end].transpose(0, 1)
        output[rows] = _attend(query[rows].transpose(0, 1), keys, values, start, scale).transpose(0, 1)
    return output


def check_fit(query: Tensor, key_pages: Tensor, value_pages: Tensor) -> None:
    """ValueError unless they have the shapes that paged_attention takes."""
    heads, width = query.shape[1:]
    _, page_size, kv_heads, value_width = value_pages.shape
    if heads % kv_heads or key_pages.shape[1:] != (page_size, kv_heads, width) or value_width > width:
        raise ValueError(f"pages {tuple(key_pages.shape)} and {tuple(value_pages.shape)} do not fit {heads} of {width}")


def _attend(query: Tensor, keys: Tensor, values: Tensor, start: int, scale: float) -> Tensor:
    """query: [heads, L, d] at positions start + i; keys, values: [kv_heads, start + L, d, or less of values]."""
    (_, length, width), value_width = query.shape, values.shape[2]
    whole = start == 0 and length > 1
    mask = None
    if start and length > 1:
        places = torch.arange(start + length, device=query.device)
        mask = places <= places[start:, None]
    if value_width < width:  # Torch's kernel that does not keep all scores takes no other values.
        values = F.pad(values, (0, width - value_width))
    attended = F.scaled_dot_product_attention(
        query[None], keys[None], values[None], attn_mask=mask, is_causal=whole, scale=scale, enable_gqa=True
    )
    return attended[0, :, :, :value_width]
