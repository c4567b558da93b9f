"""The same as reference.py, by Triton: pages are read in place, and scores are never kept.

A program computes a tile of a prompt's tokens (flash attention: Dao, 2023, arXiv:2307.08691). A decoding row is split
into parts, which are combined. The query heads that share keys are rows of one tile. Blocks and parts lie by a row's
own positions, whatever else is in the batch and however wide the table: so its result is the same in all of them.
"""

import math
from typing import Any

import torch
import triton
from torch import Tensor
from triton import language as tl

from baton.kernels.attention.paged import reference, tiles
from baton.kernels.runtime.triton import KernelConfig, launch
from baton.kernels.runtime.triton.jit import jit
from baton.kernels.runtime.triton.layout import row_stride

# The most parts of a decoding row, of all heads that have keys together: enough for a GPU that has this row alone.
PARTS = 128
# Positions that are not worth a second part.
SHORTEST = tl.constexpr(256)
# Enough for any GPU: with more rows and heads than these, a program computes several parts.
PROGRAMS = 8192


def write_pages(keys: Tensor, values: Tensor, key_pages: Tensor, value_pages: Tensor, places: Tensor) -> None:
    """See reference.write_pages. Tokens of keys and values may lie apart, and so may pages."""
    page_size, kv_heads, width = key_pages.shape[1:]
    row = kv_heads * width
    block = triton.next_power_of_2(row)
    launch(
        _write_pages,
        (len(keys), 2),
        *(keys, values, key_pages, value_pages, places),
        config=KernelConfig({}, warps=min(8, max(1, block // 256))),
        ROW=row,
        PAGE=page_size,
        KEYS_ROW=row_stride(keys),
        VALUES_ROW=row_stride(values),
        KEY_STRIDE=row_stride(key_pages),
        VALUE_STRIDE=row_stride(value_pages),
        BLOCK=block,
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
) -> Tensor:
    """See reference.paged_attention; but offsets and starts lie on the device. ValueError for other layouts.

    The first `prompts` segments have up to `longest` tokens, and each behind them has one. Tokens of the query may lie
    apart, and so may pages, and rows of the table, and positions and heads of values.
    """
    reference.check_fit(query, key_pages, value_pages)
    kv_heads, value_width = value_pages.shape[2:]
    output = torch.empty(*query.shape[:2], value_width, dtype=query.dtype, device=query.device)
    given = (query, key_pages, value_pages, page_table, row_stride(page_table), scale / math.log(2))
    layout = _layout(query, key_pages, value_pages)
    if prompts:
        config = tiles.prefill_config(query, value_pages)
        blocks = triton.cdiv(longest, config.blocks["BLOCK_M"] // layout["GROUP"])
        grid = (blocks, kv_heads * layout["VALUE_PARTS"], prompts)
        launch(_prefill, grid, *given, offsets, starts, output, config=config, **layout)
    if prompts < len(page_table):
        _attend_from_rows(given, starts, prompts, output, layout)
    return output


def _layout(query: Tensor, key_pages: Tensor, value_pages: Tensor) -> dict[str, int]:
    """What the kernels are compiled for; ValueError where what should does not lie side by side."""
    heads, width = query.shape[1:]
    _, page_size, kv_heads, value_width = value_pages.shape
    if value_pages.stride(3) != 1:
        raise ValueError(f"values with strides {value_pages.stride()} are not contiguous")
    columns = tiles.columns_of_values(heads // kv_heads, width, value_width)
    return {
        "GROUP": heads // kv_heads,
        "HEADS": heads,
        "WIDTH": width,
        "VALUE_WIDTH": value_width,
        "BLOCK_WIDTH": tiles.columns_of_keys(width),
        "BLOCK_VALUE": columns,
        "VALUE_PARTS": triton.cdiv(value_width, columns),
        "PAGE": page_size,
        "KEY_STRIDE": row_stride(key_pages),
        "KEY_POSITION": kv_heads * width,
        "VALUE_STRIDE": value_pages.stride(0),
        "VALUE_POSITION": value_pages.stride(1),
        "VALUE_HEAD": value_pages.stride(2),
        "QUERY_STRIDE": row_stride(query),
    }


def _attend_from_rows(
    given: tuple[Any, ...], starts: Tensor, prompts: int, output: Tensor, layout: dict[str, int]
) -> None:
    """The segments behind the prompts."""
    query, _, value_pages, page_table, *_ = given
    tokens, heads, _ = query.shape
    page_size, kv_heads, value_width = value_pages.shape[1:]
    rows = len(page_table) - prompts
    parts = triton.next_power_of_2(triton.cdiv(PARTS, kv_heads))
    room = min(parts, triton.cdiv(page_table.shape[1] * page_size, SHORTEST.value))
    sums = torch.empty(rows, heads, room, value_width, dtype=torch.float32, device=query.device)
    marks = torch.empty(rows, heads, room, 2, dtype=torch.float32, device=query.device)
    where = (starts, prompts, tokens - rows, room)
    grid = (kv_heads * layout["VALUE_PARTS"], rows, min(room, triton.cdiv(PROGRAMS, rows * kv_heads)))
    layout = {**layout, "PARTS": parts, "BLOCK_M": max(16, triton.next_power_of_2(layout["GROUP"]))}
    config = tiles.decode_config(query, value_pages)
    launch(_decode, grid, *given, *where, sums, marks, config=config, **layout)
    columns = tiles.combined_columns(parts, value_width)
    shape = {"WIDTH": value_width, "BLOCK_WIDTH": columns, "PARTS": parts}
    grid = (heads, rows, triton.cdiv(value_width, columns))
    launch(_combine, grid, sums, marks, *where, output, config=KernelConfig(), **shape)


@jit
def _attend(
    query,
    is_row,
    value_dims,
    best,
    total,
    sums,
    first,
    stop,
    limits,
    end,
    scale,
    key_ptr,
    value_ptr,
    table_ptr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    KEY_POSITION: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    VALUE_POSITION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    """Let the query attend to the positions from first to stop, a block at a time.

    query: [M, width]; where that is more than a block, pointers to the first one, for the rows in is_row [M].
    best, total [M] and sums [M, value_dims]: the largest score, and sums of 2^(score - best) and of the columns
    value_dims of values, weighed by it. limits [M]: a row sees the positions before its own; end: those that are there.
    IS_WHOLE: all rows see them all.
    """
    columns = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_WIDTH)
    is_dim = (dims < WIDTH)[None, :]
    is_value_dim = (value_dims < VALUE_WIDTH)[None, :]
    # A block's pages are looked up while the one before is computed.
    pages = tl.load(table_ptr + (first + columns) // PAGE, first + columns < end, other=0)
    for begin in range(first, stop, BLOCK_N):
        positions = begin + columns
        page, inner = pages.to(tl.int64)[:, None], ((positions % PAGE) * KEY_POSITION)[:, None] + dims[None, :]
        is_there = (positions < end)[:, None]
        key_ptrs = key_ptr + page * KEY_STRIDE + inner
        if WIDTH <= BLOCK_WIDTH:
            keys = tl.load(key_ptrs, is_there & is_dim, other=0.0)
        following = positions + BLOCK_N
        pages = tl.load(table_ptr + following // PAGE, following < end, other=0)
        if WIDTH <= BLOCK_WIDTH:
            scores = tl.dot(query, tl.trans(keys.to(query.dtype)), input_precision="ieee") * scale
        else:
            scores = _scores_of_pieces(query, is_row, key_ptrs, is_there, dims, WIDTH) * scale
        if not IS_WHOLE:
            scores = tl.where(positions[None, :] < limits[:, None], scores, float("-inf"))
        larger = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - larger[:, None])
        kept = tl.exp2(best - larger)
        best = larger
        total = total * kept + tl.sum(weights, 1)
        inner = ((positions % PAGE) * VALUE_POSITION)[:, None] + value_dims[None, :]
        values = tl.load(value_ptr + page * VALUE_STRIDE + inner, is_there & is_value_dim, other=0.0)
        sums = tl.dot(weights.to(values.dtype), values, sums * kept[:, None], input_precision="ieee")
    return best, total, sums


@jit
def _scores_of_pieces(query_ptrs, is_row, key_ptrs, is_there, dims, WIDTH: tl.constexpr):
    """Products [M, N] of queries and keys, a piece of their width at a time; pointers and dims [D]: the first's."""
    BLOCK_WIDTH: tl.constexpr = dims.shape[0]
    scores = tl.zeros([query_ptrs.shape[0], key_ptrs.shape[0]], tl.float32)
    for piece in range(0, WIDTH, BLOCK_WIDTH):
        is_dim = (piece + dims < WIDTH)[None, :]
        query = tl.load(query_ptrs + piece, is_row[:, None] & is_dim, other=0.0)
        keys = tl.load(key_ptrs + piece, is_there & is_dim, other=0.0)
        scores = tl.dot(query, tl.trans(keys.to(query.dtype)), scores, input_precision="ieee")
    return scores


@jit
def _prefill(
    query_ptr,
    key_ptr,
    value_ptr,
    table_ptr,
    table_stride,
    scale,
    offsets_ptr,
    starts_ptr,
    output_ptr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    VALUE_PARTS: tl.constexpr,
    PAGE: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    KEY_POSITION: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    VALUE_POSITION: tl.constexpr,
    VALUE_HEAD: tl.constexpr,
    QUERY_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A tile of a segment's tokens, of a head that has keys; the last, which takes longest, is begun first."""
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    segment, kv_head = tl.program_id(2), tl.program_id(1) // VALUE_PARTS
    origin = tl.load(offsets_ptr + segment)
    length = (tl.load(offsets_ptr + segment + 1) - origin).to(tl.int32)
    start = tl.load(starts_ptr + segment).to(tl.int32)
    first = (tl.cdiv(length, TOKENS) - 1 - tl.program_id(0)) * TOKENS
    if first < 0:
        return
    rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_WIDTH)
    tokens = first + rows // GROUP
    is_row = (tokens < length) & (rows < TOKENS * GROUP)
    inside = is_row[:, None] & (dims < WIDTH)[None, :]
    head = kv_head * GROUP + rows % GROUP
    query_row = head * WIDTH
    place = (origin + tokens)[:, None]
    query = query_ptr + place * QUERY_STRIDE + query_row[:, None] + dims[None, :]
    if WIDTH <= BLOCK_WIDTH:
        query = tl.load(query, inside, other=0.0)

    key_ptr += kv_head * WIDTH
    value_ptr += kv_head * VALUE_HEAD
    value_dims = tl.program_id(1) % VALUE_PARTS * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)
    table_ptr += segment.to(tl.int64) * table_stride
    limits = start + tokens + 1
    end = start + tl.minimum(first + TOKENS, length)
    whole = (start + first + 1) // BLOCK_N * BLOCK_N
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_VALUE], tl.float32)
    best, total, sums = _attend(
        *(query, is_row, value_dims, best, total, sums, 0, whole, limits, end, scale, key_ptr, value_ptr, table_ptr),
        *(WIDTH, VALUE_WIDTH, BLOCK_WIDTH, PAGE, KEY_STRIDE, KEY_POSITION, VALUE_STRIDE, VALUE_POSITION),
        *(BLOCK_N, True),
    )
    best, total, sums = _attend(
        *(query, is_row, value_dims, best, total, sums, whole, end, limits, end, scale, key_ptr, value_ptr, table_ptr),
        *(WIDTH, VALUE_WIDTH, BLOCK_WIDTH, PAGE, KEY_STRIDE, KEY_POSITION, VALUE_STRIDE, VALUE_POSITION),
        *(BLOCK_N, False),
    )
    sums = sums / total[:, None]
    target = output_ptr + place * (HEADS * VALUE_WIDTH) + (head * VALUE_WIDTH)[:, None] + value_dims[None, :]
    tl.store(target, sums.to(output_ptr.dtype.element_ty), is_row[:, None] & (value_dims < VALUE_WIDTH)[None, :])


@jit
def _span(length, PARTS: tl.constexpr):
    """How many positions of a row each part but the last has: a multiple of all blocks, and PARTS are enough."""
    return tl.maximum(SHORTEST, tl.cdiv(length, PARTS * 128) * 128)


@jit
def _decode(
    query_ptr,
    key_ptr,
    value_ptr,
    table_ptr,
    table_stride,
    scale,
    starts_ptr,
    first_segment,
    first_token,
    room,
    sums_ptr,
    marks_ptr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    VALUE_PARTS: tl.constexpr,
    PAGE: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    KEY_POSITION: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    VALUE_POSITION: tl.constexpr,
    VALUE_HEAD: tl.constexpr,
    QUERY_STRIDE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Every so many parts of a row, as many as there are programs for it, of a head that has keys.

    Programs that have columns of the same values write the same marks.
    """
    kv_head, row = tl.program_id(0) // VALUE_PARTS, tl.program_id(1).to(tl.int64)
    length = tl.load(starts_ptr + first_segment + row).to(tl.int32) + 1
    span = _span(length, PARTS)
    rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_WIDTH)
    is_head = rows < GROUP
    inside = is_head[:, None] & (dims < WIDTH)[None, :]
    head = kv_head * GROUP + rows
    query = query_ptr + (first_token + row) * QUERY_STRIDE + head[:, None] * WIDTH + dims[None, :]
    if WIDTH <= BLOCK_WIDTH:
        query = tl.load(query, inside, other=0.0)
    key_ptr += kv_head * WIDTH
    value_ptr += kv_head * VALUE_HEAD
    value_dims = tl.program_id(0) % VALUE_PARTS * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)
    table_ptr += (first_segment + row) * table_stride
    for part in range(tl.program_id(2), tl.cdiv(length, span), tl.num_programs(2)):
        end = tl.minimum((part + 1) * span, length)
        best = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        sums = tl.zeros([BLOCK_M, BLOCK_VALUE], tl.float32)
        limits = tl.full([BLOCK_M], 0, tl.int32) + end
        best, total, sums = _attend(
            *(query, is_head, value_dims, best, total, sums),
            *(part * span, end, limits, end, scale, key_ptr, value_ptr, table_ptr),
            *(WIDTH, VALUE_WIDTH, BLOCK_WIDTH, PAGE, KEY_STRIDE, KEY_POSITION, VALUE_STRIDE, VALUE_POSITION),
            *(BLOCK_N, False),
        )
        place = (row * HEADS + head) * room + part
        is_sum = is_head[:, None] & (value_dims < VALUE_WIDTH)[None, :]
        tl.store(sums_ptr + place[:, None] * VALUE_WIDTH + value_dims[None, :], sums, is_sum)
        tl.store(marks_ptr + place * 2, best, is_head)
        tl.store(marks_ptr + place * 2 + 1, total, is_head)


@jit
def _combine(
    sums_ptr,
    marks_ptr,
    starts_ptr,
    first_segment,
    first_token,
    room,
    output_ptr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
):
    """A row's head: its parts, each weighed by its largest score, always as if there were PARTS of them."""
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(0)
    length = tl.load(starts_ptr + first_segment + row).to(tl.int32) + 1
    parts, dims = tl.arange(0, PARTS), tl.arange(0, BLOCK_WIDTH)
    if WIDTH > BLOCK_WIDTH:
        dims += tl.program_id(2) * BLOCK_WIDTH
    is_part, is_dim = parts < tl.cdiv(length, _span(length, PARTS)), dims < WIDTH
    place = (row * heads + head) * room + parts
    best = tl.load(marks_ptr + place * 2, is_part, other=float("-inf"))
    total = tl.load(marks_ptr + place * 2 + 1, is_part, other=0.0)
    inside = is_part[:, None] & is_dim[None, :]
    sums = tl.load(sums_ptr + place[:, None] * WIDTH + dims[None, :], inside, other=0.0)
    weights = tl.exp2(best - tl.max(best, 0))
    mixed = tl.sum(sums * weights[:, None], 0) / tl.sum(total * weights, 0)
    target = output_ptr + ((first_token + row) * heads + head) * WIDTH + dims
    tl.store(target, mixed.to(output_ptr.dtype.element_ty), is_dim)


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
    """A token's keys, or its values."""
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
    """Elements from the first page to a place: pages are STRIDE apart, and in them there are ROW for a position."""
    place = place.to(tl.int64)
    return place // PAGE * STRIDE + place % PAGE * ROW


@jit
def copy_row(source_ptr, target_ptr, ROW: tl.constexpr, BLOCK: tl.constexpr):
    """ROW elements, as the target's type."""
    columns = tl.arange(0, BLOCK)
    inside = columns < ROW
    tl.store(
        target_ptr + columns, tl.load(source_ptr + columns, inside, other=0.0).to(target_ptr.dtype.element_ty), inside
    )
