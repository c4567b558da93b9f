"""Causal grouped-query attention over paged keys and values."""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F


def write_pages(keys: Tensor, values: Tensor, key_pages: Tensor, value_pages: Tensor, places: Tensor) -> None:
    """Write keys and values [T, kv_heads, head_dim] to the pages, in place, rounded to the dtype of the pages.

    places: int64 [T], each token's flat KV index: page · page_size + offset.
    """
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
    seen_from: int = 0,
    window: int = 0,
) -> Tensor:
    """Compute causal softmax attention of each segment over its pages: [T, heads, value_dim] in query's dtype.

    The token at absolute position p attends to positions seen_from to p, so p must be at least seen_from. With a
    window, it attends only to the last `window` of them, p included. The keys and values of the segments' own tokens
    must already be in the pages. Raise ValueError if the shapes of the pages do not fit the query.

    query: [T, heads, head_dim], packed: segment s is rows [offsets[s], offsets[s+1]). A decode row is one token long.
    key_pages: [pages, page_size, kv_heads, head_dim].
    value_pages: [pages, page_size, kv_heads, value_dim] with value_dim ≤ head_dim; may be a view of the first columns
        of wider pages.
    page_table: int [segments, max_pages]. No entry after a segment's last token is read.
    offsets: int64 [segments + 1], on the host.
    starts: int64 [segments], on the host: the absolute position of each segment's first token.
    scale: factor of the scores, usually head_dim ** -0.5.
    seen_from: the first position that any token attends to.
    window: how many positions a token attends to, its own included; 0: all.
    """
    check_fit(query, key_pages, value_pages)
    page_size = key_pages.shape[1]
    output = query.new_empty(*query.shape[:2], value_pages.shape[3])
    for segment, (start, (begin, stop)) in enumerate(zip(starts.tolist(), pairwise(offsets.tolist()), strict=True)):
        rows = slice(begin, stop)
        end = start + rows.stop - rows.start
        first = max(seen_from, start + 1 - window) if window else seen_from
        first_page = first // page_size
        pages = page_table[segment, first_page : -(-end // page_size)].long()
        inside = slice(first - first_page * page_size, end - first_page * page_size)
        keys = key_pages[pages].flatten(0, 1)[inside].transpose(0, 1)
        values = value_pages[pages].flatten(0, 1)[inside].transpose(0, 1)
        attended = _attend(query[rows].transpose(0, 1), keys, values, start - first, scale, window)
        output[rows] = attended.transpose(0, 1)
    return output


def check_fit(query: Tensor, key_pages: Tensor, value_pages: Tensor) -> None:
    """Raise ValueError unless paged_attention can compute with these shapes."""
    heads, width = query.shape[1:]
    _, page_size, kv_heads, value_width = value_pages.shape
    if heads % kv_heads or key_pages.shape[1:] != (page_size, kv_heads, width) or value_width > width:
        raise ValueError(f"pages {tuple(key_pages.shape)} and {tuple(value_pages.shape)} do not fit {heads} of {width}")


def _attend(query: Tensor, keys: Tensor, values: Tensor, start: int, scale: float, window: int) -> Tensor:
    """Return the attention [heads, L, value_dim] of one segment.

    query: [heads, L, d], at positions start to start + L - 1. Positions below 0 get no result.
    keys: [kv_heads, start + L, d]. values: [kv_heads, start + L, value_dim], value_dim ≤ d.
    window: how many positions a query attends to; 0: all.
    """
    (_, length, width), value_width = query.shape, values.shape[2]
    is_windowed = bool(window) and start + length > window
    whole = start == 0 and length > 1 and not is_windowed
    mask = None
    if length > 1 and not whole:
        places = torch.arange(start + length, device=query.device)
        of_rows = torch.arange(start, start + length, device=query.device)[:, None]
        mask = places <= of_rows
        if is_windowed:
            mask &= places > of_rows - window
    if value_width < width:  # Torch's flash kernel, which never stores all scores, requires equal widths.
        values = F.pad(values, (0, width - value_width))
    attended = F.scaled_dot_product_attention(
        query[None], keys[None], values[None], attn_mask=mask, is_causal=whole, scale=scale, enable_gqa=True
    )
    return attended[0, :, :, :value_width]
