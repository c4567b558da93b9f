"""The step between the QKV projections and attention: rotary embedding, and the write of keys and values to pages."""

from torch import Tensor

import baton.kernels.attention.paged.reference
import baton.kernels.attention.rotary.reference


def rotate_and_write(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    key_pages: Tensor,
    value_pages: Tensor,
    places: Tensor,
) -> Tensor:
    """Rotate query and keys, write keys and values to the pages, and return the rotated query [T, heads, head_dim].

    kernels/attention/rotary/reference.py defines the rotation, kernels/attention/paged/reference.py the write.

    cos, sin: float32 [T, 1, width ≤ head_dim], or None to leave query and keys unrotated.
    places: int64 [T], each token's flat KV index: page · page_size + offset.
    """
    if cos is not None and sin is not None:
        query = baton.kernels.attention.rotary.reference.rotate(query, cos, sin)
        keys = baton.kernels.attention.rotary.reference.rotate(keys, cos, sin)
    baton.kernels.attention.paged.reference.write_pages(keys, values, key_pages, value_pages, places)
    return query
