"""What lies between attention's projections and attention: positions are encoded, and keys and values kept."""

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
    """Rotate query [T, heads, head_dim] and keys, store keys and values at their places; return the query, rotated.

    kernels/attention/rotary/reference.py defines the rotation, kernels/attention/paged/reference.py the storing.
    cos and sin have a head's whole width or less; None leaves query and keys as they are.
    """
    if cos is not None and sin is not None:
        query = baton.kernels.attention.rotary.reference.rotate(query, cos, sin)
        keys = baton.kernels.attention.rotary.reference.rotate(keys, cos, sin)
    baton.kernels.attention.paged.reference.write_pages(keys, values, key_pages, value_pages, places)
    return query
