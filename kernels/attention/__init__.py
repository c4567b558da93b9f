"""Attention over pages."""

from collections.abc import Sequence

from torch import Tensor

from kernels.attention import native, reference
from kernels.attention.reference import write_pages

__all__ = ["paged_attention", "write_pages"]


def paged_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    offsets: Sequence[int],
    starts: Sequence[int],
    scale: float,
) -> Tensor:
    """See reference.paged_attention."""
    usable = native.takes(query, key_pages, value_pages, page_table)
    run = native.paged_attention if usable else reference.paged_attention
    return run(query, key_pages, value_pages, page_table, offsets, starts, scale)
