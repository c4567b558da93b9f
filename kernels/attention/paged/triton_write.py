"""The writes of keys and values into pages, in Triton."""

from functools import cache

from torch import Tensor
from triton import language as tl

from baton.kernels.runtime.triton import KernelConfig, launch
from baton.kernels.runtime.triton.jit import jit
from baton.kernels.runtime.triton.layout import row_stride
from baton.kernels.runtime.triton.sizes import next_power_of_2


def write_pages(keys: Tensor, values: Tensor, key_pages: Tensor, value_pages: Tensor, places: Tensor) -> None:
    """Compute reference.write_pages. Keys, values and pages may be strided in their first dimension."""
    page_size, kv_heads, width = key_pages.shape[1:]
    row = kv_heads * width
    block = next_power_of_2(row)
    launch(
        _write_pages,
        (len(keys), 2),
        *(keys, values, key_pages, value_pages, places),
        config=_write_config(block),
        ROW=row,
        PAGE=page_size,
        KEYS_ROW=row_stride(keys),
        VALUES_ROW=row_stride(values),
        KEY_STRIDE=row_stride(key_pages),
        VALUE_STRIDE=row_stride(value_pages),
        BLOCK=block,
    )


@cache
def _write_config(block: int) -> KernelConfig:
    """Return the configuration of _write_pages for blocks of this size."""
    return KernelConfig({}, warps=min(8, max(1, block // 256)))


@jit
def _write_pages(
    keys_ptr,
    values_ptr,
    key_pages_ptr,
    value_pages_ptr,
    places_ptr,
    ROW: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS_ROW: tl.constexpr,
    VALUES_ROW: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the keys (program 0 of the second dimension) or the values (program 1) of one token."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(places_ptr + token)
    if tl.program_id(1) == 0:
        copy_row(keys_ptr + token * KEYS_ROW, key_pages_ptr + in_pages(place, PAGE, ROW, KEY_STRIDE), ROW, BLOCK)
    else:
        copy_row(
            values_ptr + token * VALUES_ROW, value_pages_ptr + in_pages(place, PAGE, ROW, VALUE_STRIDE), ROW, BLOCK
        )


@jit
def in_pages(place, PAGE: tl.constexpr, ROW: tl.constexpr, STRIDE: tl.constexpr):
    """Return the element offset of flat KV index `place`. Pages are STRIDE apart, and positions in a page ROW apart."""
    place = place.to(tl.int64)
    return place // PAGE * STRIDE + place % PAGE * ROW


@jit
def copy_row(source_ptr, target_ptr, ROW: tl.constexpr, BLOCK: tl.constexpr):
    """Copy ROW elements, converted to the target's dtype."""
    columns = tl.arange(0, BLOCK)
    inside = columns < ROW
    tl.store(
        target_ptr + columns, tl.load(source_ptr + columns, inside, other=0.0).to(target_ptr.dtype.element_ty), inside
    )
