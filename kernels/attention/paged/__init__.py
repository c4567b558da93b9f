"""Attention over pages."""

from torch import Tensor

from baton.kernels.attention.paged import native, reference
from baton.kernels.runtime import triton as gpu

__all__ = ["paged_attention", "write_pages"]


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
) -> Tensor:
    """See reference.paged_attention. The first `prompts` segments have up to `longest` tokens, the others one."""
    if gpu.takes(query):
        from baton.kernels.attention.paged import triton

        layout = (page_table, offsets, starts)
        return triton.paged_attention(query, key_pages, value_pages, *layout, scale, prompts, longest)
    usable = native.takes(query, key_pages, value_pages, page_table)
    run = native.paged_attention if usable else reference.paged_attention
    return run(query, key_pages, value_pages, page_table, offsets, starts, scale)


def write_pages(keys: Tensor, values: Tensor, key_pages: Tensor, value_pages: Tensor, places: Tensor) -> None:
    """See reference.write_pages."""
    if gpu.takes(keys):
        from baton.kernels.attention.paged import triton

        return triton.write_pages(keys, values, key_pages, value_pages, places)
    run = native.write_pages if native.takes_written(keys, values, key_pages, value_pages) else reference.write_pages
    return run(keys, values, key_pages, value_pages, places)
