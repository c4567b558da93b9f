"""The operation of reference.py in C++ (cpu.cpp). Pages are read in place, and the scores are never stored."""

from itertools import product

import torch
from torch import Tensor

from baton.kernels.attention.paged import reference
from baton.kernels.runtime import cpp
from baton.kernels.runtime.cpp import FLOAT, INT, INT64, POINTER, TYPES
from baton.kernels.runtime.cpp.checks import assert_agrees

NAME = "baton_paged_attention"
ARGUMENTS = [
    *(INT, POINTER, INT, POINTER, INT64, POINTER, *(INT64,) * 3),
    *(POINTER, *(INT64,) * 5),
    *(POINTER,) * 2,
    *(INT64,) * 5,
    *(FLOAT, POINTER),
]
WRITE = "baton_write_pages"
# How many query rows (tokens times the heads that share keys) are multiplied with a block of keys at once.
ROWS = 64


def takes(query: Tensor, key_pages: Tensor, value_pages: Tensor, page_table: Tensor) -> bool:
    """Return whether the C function is installed and takes these tensors."""
    return (
        cpp.function(NAME) is not None
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
    offsets: Tensor,
    starts: Tensor,
    scale: float,
    seen_from: int = 0,
    window: int = 0,
) -> Tensor:
    """Compute reference.paged_attention. Raise ValueError for layouts that the C function does not take.

    Key pages and rows of the page table may be strided in their first dimension, values in all but the last.
    """
    reference.check_fit(query, key_pages, value_pages)
    heads, width = query.shape[1:]
    _, page_size, kv_heads, value_width = value_pages.shape
    if not key_pages[:1].is_contiguous() or value_pages.stride(3) != 1:
        raise ValueError(f"keys with strides {key_pages.stride()} or values with {value_pages.stride()} are not pages")
    if not len(page_table) == len(starts) == len(offsets) - 1 or page_table.stride(-1) != 1:
        raise ValueError(f"{len(starts)} segments and a page table of {tuple(page_table.shape)} do not fit")
    tokens = max(1, ROWS * kv_heads // heads)
    for numbers in (offsets, starts):
        if numbers.dtype != torch.int64 or not numbers.is_contiguous():
            raise ValueError(f"the segments are {numbers.dtype} with stride {numbers.stride()}")
    query, run = query.contiguous(), cpp.function(NAME)
    assert run is not None
    output = query.new_empty(*query.shape[:2], value_width)
    run(
        *(TYPES[query.dtype], query.data_ptr(), TYPES[key_pages.dtype]),
        *(key_pages.data_ptr(), key_pages.stride(0), value_pages.data_ptr(), *value_pages.stride()[:3]),
        *(page_table.data_ptr(), page_table.stride(0), len(starts), tokens, seen_from, window),
        *(offsets.data_ptr(), starts.data_ptr()),
        *(heads, kv_heads, width, value_width, page_size),
        *(scale, output.data_ptr()),
    )
    return output


def takes_written(keys: Tensor, values: Tensor, key_pages: Tensor, value_pages: Tensor) -> bool:
    """Return whether the C function is installed and takes these tensors."""
    return (
        cpp.function(WRITE) is not None
        and keys.device.type == "cpu"
        and keys.dtype == values.dtype == key_pages.dtype == value_pages.dtype
        and all(tensor.is_contiguous() for tensor in (keys, values, key_pages[:1], value_pages[:1]))
    )


def write_pages(keys: Tensor, values: Tensor, key_pages: Tensor, value_pages: Tensor, places: Tensor) -> None:
    """Compute reference.write_pages; only for arguments that `takes_written` accepts.

    Raise ValueError unless places are int64 [T].
    """
    if places.dtype != torch.int64 or places.shape != (len(keys),) or not places.is_contiguous():
        raise ValueError(f"places must be {len(keys)} contiguous int64 numbers")
    run, row = cpp.function(WRITE), keys[:1].numel() * keys.itemsize
    assert run is not None
    for entries, pages in ((keys, key_pages), (values, value_pages)):
        stride = pages.stride(0) * pages.itemsize
        run(entries.data_ptr(), pages.data_ptr(), stride, places.data_ptr(), len(entries), pages.shape[1], row)


def check() -> None:
    """Raise AssertionError if the C function differs from the reference."""
    g = torch.Generator().manual_seed(0)
    table = torch.randperm(20, generator=g).view(2, 10).int()
    offsets, starts = torch.tensor([0, 30, 31]), torch.tensor([50, 7])
    pages = torch.randn(2, 20, 8, 2, 20, generator=g)
    for dtype, width in product(TYPES, (20, 17)):
        query, (keys, values) = torch.randn(31, 6, 20, generator=g).to(dtype), pages.to(dtype)
        values, layout = values[..., :width], (table, offsets, starts)
        tolerance = 1e-4 if dtype == torch.float32 else 0.02
        for seen in ((0, 0), (5, 0), (0, 9)):
            found = paged_attention(query, keys, values, *layout, 0.3, *seen)
            exact = reference.paged_attention(query.float(), keys.float(), values.float(), *layout, 0.3, *seen)
            assert_agrees(found.float(), exact, rtol=tolerance, atol=tolerance)


def check_write() -> None:
    """Raise AssertionError if the C function differs from the reference."""
    places, pages = torch.tensor([9, 2, 5]), torch.zeros(4, 2, 3, 2, 20)
    keys, values = torch.randn(2, 3, 2, 20, generator=torch.Generator().manual_seed(0))
    expected = pages.clone()
    write_pages(keys, values, pages[:, 0], pages[:, 1], places)
    reference.write_pages(keys, values, expected[:, 0], expected[:, 1], places)
    assert torch.equal(pages, expected)


cpp.declare(NAME, ARGUMENTS, check)
cpp.declare(WRITE, [POINTER, POINTER, INT64, POINTER, INT64, INT64, INT64], check_write)
