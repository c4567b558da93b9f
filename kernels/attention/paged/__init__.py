"""Attention over pages of keys and values."""

from torch import Tensor

from baton.kernels.attention.paged import native, reference
from baton.kernels.runtime.dispatch import dispatch
from baton.kernels.runtime.triton import takes

__all__ = ["paged_attention", "write_pages"]

write_pages = dispatch(
    reference.write_pages,
    (native.takes_written, native.write_pages),
    triton="baton.kernels.attention.paged.triton_write",
)


def paged_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    offsets: Tensor,
    starts: Tensor,
    scale: float,
    prompts: int,
    longest: int,
    seen_from: int = 0,
    window: int = 0,
) -> Tensor:
    """Compute reference.paged_attention with the fastest form. Only Triton's grid needs `prompts` and `longest`.

    Triton computes only with seen_from = 0; with another one, the reference does.

    prompts: how many segments are prompts. Prompts come first; each later segment is one token of a decoding row.
    longest: the number of tokens of the longest prompt.
    """
    if takes(query) and not seen_from:
        from baton.kernels.attention.paged import triton

        layout = (page_table, offsets, starts)
        return triton.paged_attention(query, key_pages, value_pages, *layout, scale, prompts, longest, window)
    usable = native.takes(query, key_pages, value_pages, page_table)
    run = native.paged_attention if usable else reference.paged_attention
    return run(query, key_pages, value_pages, page_table, offsets, starts, scale, seen_from, window)
