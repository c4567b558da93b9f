"""Rotate query and keys by their positions, and write keys and values to pages: one kernel on a GPU."""

from torch import Tensor

from baton.kernels.attention.paged import write_pages
from baton.kernels.attention.rotary import rotate
from baton.kernels.runtime.triton import takes

__all__ = ["rotate_and_write"]


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
    """Compute reference.rotate_and_write with the fastest form that takes the tensors."""
    if cos is not None and sin is not None:
        if takes(query):
            from baton.kernels.attention.rotate_and_write import triton

            return triton.rotate_and_write(query, keys, values, cos, sin, key_pages, value_pages, places)
        query, keys = rotate(query, cos, sin), rotate(keys, cos, sin)
    write_pages(keys, values, key_pages, value_pages, places)
    return query
