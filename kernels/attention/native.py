"""The same as reference.py, by cpu.cpp: pages are read in place, and scores are never kept."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from kernels import native
from kernels.attention import reference
from kernels.native import FLOAT, INT, INT64, POINTER, TYPES
from kernels.native.checks import assert_agrees

NAME = "baton_paged_attention"
ARGUMENTS = [
    *(INT, POINTER, INT, POINTER, INT64, POINTER, INT64),
    *(POINTER, INT64, INT64, INT64),
    *(POINTER,) * 3,
    *(INT64,) * 4,
    *(FLOAT, POINTER),
]
# Queries, of all heads that share keys, that pass over a block of keys together.
ROWS = 64


def takes(query: Tensor, key_pages: Tensor, value_pages: Tensor, page_table: Tensor) -> bool:
    """Whether the C function is installed and made for these."""
    return (
        native.function(NAME) is not None
        and query.device.type == "cpu"
        and query.dtype in TYPES
        and key_pages.dtype in TYPES
        and key_pages.dtype == value_pages.dtype
        and page_table.dtype == torch.int32
    )


def paged_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    offsets: Sequence[int],
    starts: Sequence[int],
    scale: float,
) -> Tensor:
    """See reference.paged_attention. Pages may lie apart, and rows of the table; ValueError for other layouts."""
    heads, width = query.shape[1:]
    _, page_size, kv_heads, _ = key_pages.shape
    for pages in (key_pages, value_pages):
        if pages.shape[1:] != (page_size, kv_heads, width) or not pages[:1].is_contiguous():
            raise ValueError(f"{tuple(pages.shape)} with strides {pages.stride()} are not pages of {width}")
    if heads % kv_heads or len(page_table) != len(starts) or page_table.stride(-1) != 1:
        raise ValueError(f"{heads} heads, {kv_heads} with keys, or the page table do not fit")
    tokens = max(1, ROWS * kv_heads // heads)
    blocks = accumulate((-(-(end - begin) // tokens) for begin, end in pairwise(offsets)), initial=0)
    layout = [torch.tensor(list(numbers), dtype=torch.int64) for numbers in (offsets, starts, blocks)]
    query, run = query.contiguous(), native.function(NAME)
    assert run is not None
    output = torch.empty_like(query)
    run(
        *(TYPES[query.dtype], query.data_ptr(), TYPES[key_pages.dtype]),
        *(key_pages.data_ptr(), key_pages.stride(0), value_pages.data_ptr(), value_pages.stride(0)),
        *(page_table.data_ptr(), page_table.stride(0), len(starts), tokens),
        *(numbers.data_ptr() for numbers in layout),
        *(heads, kv_heads, width, page_size),
        *(scale, output.data_ptr()),
    )
    return output


def check() -> None:
    """Raises AssertionError where it differs from the reference."""
    g = torch.Generator().manual_seed(0)
    table, offsets, starts = torch.randperm(20, generator=g).view(2, 10).int(), [0, 30, 31], [50, 7]
    pages = torch.randn(2, 20, 8, 2, 20, generator=g)
    for dtype in TYPES:
        query, (keys, values) = torch.randn(31, 6, 20, generator=g).to(dtype), pages.to(dtype)
        found = paged_attention(query, keys, values, table, offsets, starts, 0.3)
        exact = reference.paged_attention(query.float(), keys.float(), values.float(), table, offsets, starts, 0.3)
        tolerance = 1e-4 if dtype == torch.float32 else 0.02
        assert_agrees(found.float(), exact, rtol=tolerance, atol=tolerance)


native.declare(NAME, ARGUMENTS, check)
