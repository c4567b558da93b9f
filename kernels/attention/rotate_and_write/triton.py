"""The operation of reference.py in Triton: three programs per token, for its query, its keys and its values."""

import torch
from torch import Tensor
from triton import language as tl

from baton.kernels.attention.paged.triton_write import copy_row, in_pages
from baton.kernels.attention.rotary.triton import candidates, rotate_row
from baton.kernels.runtime.triton import KernelConfig, by_shape, config_of, launch
from baton.kernels.runtime.triton.jit import jit
from baton.kernels.runtime.triton.layout import row_stride
from baton.kernels.runtime.triton.sizes import next_power_of_2


def rotate_and_write(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    places: Tensor,
) -> Tensor:
    """Compute reference.rotate_and_write. Query, keys, values and pages may be strided in their first dimension."""
    tokens, heads, width = query.shape
    (page_size, kv_heads), half = key_pages.shape[1:3], cos.shape[2] // 2
    rotated = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    config = _config(heads, kv_heads, width, query.device)
    launch(
        _rotate_and_write,
        (tokens, 3),
        *(query, keys, values, cos, sin, rotated, key_pages, value_pages, places),
        config=config,
        HEADS=heads,
        KV_HEADS=kv_heads,
        WIDTH=width,
        HALF=half,
        PAGE=page_size,
        QUERY_ROW=row_stride(query),
        KEYS_ROW=row_stride(keys),
        VALUES_ROW=row_stride(values),
        KEY_STRIDE=row_stride(key_pages),
        VALUE_STRIDE=row_stride(value_pages),
        BLOCK_HEADS=next_power_of_2(heads),
        BLOCK_KV_HEADS=next_power_of_2(kv_heads),
        BLOCK_HALF=next_power_of_2(half),
        BLOCK_REST=next_power_of_2(width - 2 * half),
        BLOCK=next_power_of_2(kv_heads * width),
    )
    return rotated


@by_shape
def _config(heads: int, kv_heads: int, width: int, device: torch.device) -> KernelConfig:
    shape = f"heads={heads} kv_heads={kv_heads} width={width}"
    return config_of("attention.rotate_and_write.rotate_and_write", shape, device, *candidates(heads, width))


@jit
def _rotate_and_write(
    query_ptr,
    keys_ptr,
    values_ptr,
    cos_ptr,
    sin_ptr,
    rotated_ptr,
    key_pages_ptr,
    value_pages_ptr,
    places_ptr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    QUERY_ROW: tl.constexpr,
    KEYS_ROW: tl.constexpr,
    VALUES_ROW: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KV_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rotate the query (part 0), rotate and write the keys (part 1), or write the values (part 2) of one token."""
    ROW: tl.constexpr = KV_HEADS * WIDTH
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cos_ptr += token * (2 * HALF)
    sin_ptr += token * (2 * HALF)
    if part == 0:
        source, target = query_ptr + token * QUERY_ROW, rotated_ptr + token * (HEADS * WIDTH)
        rotate_row(source, cos_ptr, sin_ptr, target, HEADS, WIDTH, HALF, BLOCK_HEADS, BLOCK_HALF, BLOCK_REST)
    elif part == 1:
        source = keys_ptr + token * KEYS_ROW
        target = key_pages_ptr + in_pages(tl.load(places_ptr + token), PAGE, ROW, KEY_STRIDE)
        rotate_row(source, cos_ptr, sin_ptr, target, KV_HEADS, WIDTH, HALF, BLOCK_KV_HEADS, BLOCK_HALF, BLOCK_REST)
    else:
        target = value_pages_ptr + in_pages(tl.load(places_ptr + token), PAGE, ROW, VALUE_STRIDE)
        copy_row(values_ptr + token * VALUES_ROW, target, ROW, BLOCK)
