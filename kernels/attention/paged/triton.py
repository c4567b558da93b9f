"""The operation of reference.py in Triton. Pages are read in place, and the scores are never stored.

Prompts: a program computes a tile of tokens (flash attention 2: Dao, 2023, arXiv:2307.08691). Decoding rows: programs
compute parts of a row's positions, and another kernel combines them (split-K, as in flash decoding). The query heads
that share a key head are rows of one tile. Blocks and parts are cut at a row's own positions, independent of the rest
of the batch and of the width of the page table, so the results are batch-invariant. With a window, the first block is
the one that contains the first position that is seen; earlier pages are not read.
"""

import math
from typing import Any

import torch
from torch import Tensor
from triton import language as tl

from baton.kernels.attention.paged import reference, tiles
from baton.kernels.runtime.triton import KernelConfig, launch
from baton.kernels.runtime.triton.jit import jit
from baton.kernels.runtime.triton.layout import row_stride
from baton.kernels.runtime.triton.sizes import cdiv, next_power_of_2

# Maximum parts of a decoding row, summed over its key heads: enough to fill a GPU with a single row.
PARTS = 128
# A long sequence is split into parts of at least this many positions.
SHORTEST = tl.constexpr(256)
# Parts begin and end at multiples of this number of positions, which every BLOCK_N of decoding rows divides.
ALIGNED = tl.constexpr(128)
# Programs that are enough for any GPU. If rows · key heads · parts exceed this, each program computes several parts.
PROGRAMS = 8192
COMBINE_CONFIG = KernelConfig()


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
    window: int = 0,
) -> Tensor:
    """Compute reference.paged_attention from position 0 on, except that offsets and starts are on the device.

    The query, key pages and the page table may be strided in their first dimension, value pages in all but the last.
    Raise ValueError for other layouts.

    prompts: how many segments are prompts. Prompts come first; each later segment has one token.
    longest: the number of tokens of the longest segment.
    """
    reference.check_fit(query, key_pages, value_pages)
    kv_heads, value_width = value_pages.shape[2:]
    output = torch.empty(*query.shape[:2], value_width, dtype=query.dtype, device=query.device)
    arguments = (query, key_pages, value_pages, page_table, row_stride(page_table), scale / math.log(2))
    layout = {**_layout(query, key_pages, value_pages), "WINDOW": window}
    if prompts:
        config = tiles.prefill_config(query, value_pages)
        blocks = cdiv(longest, config.blocks["BLOCK_M"] // layout["GROUP"])
        grid = (blocks, kv_heads * layout["VALUE_PARTS"], prompts)
        launch(_prefill, grid, *arguments, offsets, starts, output, config=config, **layout)
    if prompts < len(page_table):
        _attend_from_rows(arguments, starts, prompts, output, layout)
    return output


def _layout(query: Tensor, key_pages: Tensor, value_pages: Tensor) -> dict[str, int]:
    """Return the constexprs of the kernels. Raise ValueError for layouts that the kernels cannot read."""
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
        "VALUE_PARTS": cdiv(value_width, columns),
        "PAGE": page_size,
        "KEY_STRIDE": row_stride(key_pages),
        "KEY_POSITION": kv_heads * width,
        "VALUE_STRIDE": value_pages.stride(0),
        "VALUE_POSITION": value_pages.stride(1),
        "VALUE_HEAD": value_pages.stride(2),
        "QUERY_STRIDE": row_stride(query),
    }


def _attend_from_rows(
    arguments: tuple[Any, ...], starts: Tensor, prompts: int, output: Tensor, layout: dict[str, int]
) -> None:
    """Compute the one-token segments after the prompts: first the parts of each segment's positions, then their sum."""
    query, _, value_pages, page_table, *_ = arguments
    tokens, heads, _ = query.shape
    page_size, kv_heads, value_width = value_pages.shape[1:]
    rows = len(page_table) - prompts
    parts = next_power_of_2(cdiv(PARTS, kv_heads))
    longest, window = page_table.shape[1] * page_size, layout["WINDOW"]
    read = min(longest, window + ALIGNED.value - 1) if window else longest
    room = min(parts, cdiv(read, SHORTEST.value))
    sums = torch.empty(rows, heads, room, value_width, dtype=torch.float32, device=query.device)
    marks = torch.empty(rows, heads, room, 2, dtype=torch.float32, device=query.device)
    where = (starts, prompts, tokens - rows, room)
    grid = (kv_heads * layout["VALUE_PARTS"], rows, min(room, cdiv(PROGRAMS, rows * kv_heads)))
    layout = {**layout, "PARTS": parts, "BLOCK_M": max(16, next_power_of_2(layout["GROUP"]))}
    config = tiles.decode_config(query, value_pages)
    launch(_decode, grid, *arguments, *where, sums, marks, config=config, **layout)
    columns = tiles.combined_columns(parts, value_width)
    shape = {"WIDTH": value_width, "BLOCK_WIDTH": columns, "PARTS": parts, "WINDOW": window}
    grid = (heads, rows, cdiv(value_width, columns))
    launch(_combine, grid, sums, marks, *where, output, config=COMBINE_CONFIG, **shape)


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
    WINDOW: tl.constexpr,
):
    """Attend to the positions [first, stop) of a segment, BLOCK_N at a time; return the updated best, total and sums.

    This is the online softmax of flash attention with powers of 2: `scale` includes 1 / ln 2.

    query: [M, WIDTH], M rows of queries; if WIDTH > BLOCK_WIDTH, pointers to the first BLOCK_WIDTH columns instead.
    is_row: [M], whether each row of the query exists.
    value_dims: the indices of the value columns that this program computes.
    best, total: [M], the largest score so far, and the sum of 2^(score - best).
    sums: [M, len(value_dims)], the sums of these value columns, weighted with 2^(score - best).
    limits: [M], a row sees the positions below its limit.
    end: positions from here on are not in the pages, and are not loaded.
    IS_WHOLE: every row sees all positions, so no mask is needed.
    WINDOW: a row sees the last WINDOW positions below its limit; 0: all.
    """
    columns = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_WIDTH)
    is_dim = (dims < WIDTH)[None, :]
    is_value_dim = (value_dims < VALUE_WIDTH)[None, :]
    # Page numbers are loaded one block ahead, so that the loads of keys need not wait for them.
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
            is_seen = positions[None, :] < limits[:, None]
            if WINDOW:
                is_seen &= positions[None, :] >= limits[:, None] - WINDOW
            scores = tl.where(is_seen, scores, float("-inf"))
        larger = tl.maximum(best, tl.max(scores, 1))
        anchor = larger
        if WINDOW:  # Before a row's window, `larger` is -inf. With the anchor 0, weights and sums are 0 instead of NaN.
            anchor = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp2(scores - anchor[:, None])
        shrink = tl.exp2(best - anchor)  # rescales the previous sums to the new largest score
        best = larger
        total = total * shrink + tl.sum(weights, 1)
        inner = ((positions % PAGE) * VALUE_POSITION)[:, None] + value_dims[None, :]
        values = tl.load(value_ptr + page * VALUE_STRIDE + inner, is_there & is_value_dim, other=0.0)
        sums = tl.dot(weights.to(values.dtype), values, sums * shrink[:, None], input_precision="ieee")
    return best, total, sums


@jit
def _scores_of_pieces(query_ptrs, is_row, key_ptrs, is_there, dims, WIDTH: tl.constexpr):
    """Return the scores [M, N] of M wide queries and N keys.

    Scores are summed over parts of len(dims) columns; dims and the pointers are those of the first part.
    """
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
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute BLOCK_M // GROUP tokens of a segment, for the query heads of one key head and some columns of values.

    The last tokens see the most positions and take longest, so the first programs compute them.
    """
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    segment, kv_head = tl.program_id(2), tl.program_id(1) // VALUE_PARTS
    origin = tl.load(offsets_ptr + segment)
    length = (tl.load(offsets_ptr + segment + 1) - origin).to(tl.int32)
    start = tl.load(starts_ptr + segment).to(tl.int32)
    first = (tl.cdiv(length, TOKENS) - 1 - tl.program_id(0)) * TOKENS
    if first < 0:  # The grid is made for the longest segment; this one has fewer tiles.
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
    end = start + tl.minimum(first + TOKENS, length)
    limits = tl.minimum(start + tokens + 1, end)  # Rows that do not exist see what the last token sees.
    # Positions below `whole` are visible to all tokens of the tile, and need no mask if there is no window; later ones
    # need the causal mask.
    whole = (start + first + 1) // BLOCK_N * BLOCK_N
    begin = 0
    if WINDOW:
        begin = tl.maximum(start + first + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_VALUE], tl.float32)
    best, total, sums = _attend(
        *(query, is_row, value_dims, best, total, sums),
        *(begin, whole, limits, end, scale, key_ptr, value_ptr, table_ptr),
        *(WIDTH, VALUE_WIDTH, BLOCK_WIDTH, PAGE, KEY_STRIDE, KEY_POSITION, VALUE_STRIDE, VALUE_POSITION),
        *(BLOCK_N, WINDOW == 0, WINDOW),
    )
    best, total, sums = _attend(
        *(query, is_row, value_dims, best, total, sums),
        *(whole, end, limits, end, scale, key_ptr, value_ptr, table_ptr),
        *(WIDTH, VALUE_WIDTH, BLOCK_WIDTH, PAGE, KEY_STRIDE, KEY_POSITION, VALUE_STRIDE, VALUE_POSITION),
        *(BLOCK_N, False, WINDOW),
    )
    sums = sums / total[:, None]
    target = output_ptr + place * (HEADS * VALUE_WIDTH) + (head * VALUE_WIDTH)[:, None] + value_dims[None, :]
    tl.store(target, sums.to(output_ptr.dtype.element_ty), is_row[:, None] & (value_dims < VALUE_WIDTH)[None, :])


@jit
def _parts(length, WINDOW: tl.constexpr, PARTS: tl.constexpr):
    """Return where the first part of a row begins, how many positions each part has, and how many parts there are.

    Both positions are multiples of ALIGNED. At most PARTS parts cover the positions that the row sees; the last one may
    be shorter.

    length: the row's position + 1.
    """
    begin = 0
    if WINDOW:
        begin = tl.maximum(length - WINDOW, 0) // ALIGNED * ALIGNED
    span = tl.maximum(SHORTEST, tl.cdiv(length - begin, PARTS * ALIGNED) * ALIGNED)
    return begin, span, tl.cdiv(length - begin, span)


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
    WINDOW: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute every n-th part of a row for the query heads of one key head, where n programs share them.

    Each part's weighted sums go to sums_ptr. Its marks, which are the largest score and the total weight, go to
    marks_ptr. Programs for other columns of the same values write identical marks.

    room: how many parts of each row and head fit into sums_ptr and marks_ptr.
    """
    kv_head, row = tl.program_id(0) // VALUE_PARTS, tl.program_id(1).to(tl.int64)
    length = tl.load(starts_ptr + first_segment + row).to(tl.int32) + 1
    origin, span, parts = _parts(length, WINDOW, PARTS)
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
    limits = tl.full([BLOCK_M], 0, tl.int32) + length
    for part in range(tl.program_id(2), parts, tl.num_programs(2)):
        begin = origin + part * span
        end = tl.minimum(begin + span, length)
        if WINDOW:  # Skip the blocks of the first part that are before the window.
            begin = tl.maximum(begin, tl.maximum(length - WINDOW, 0) // BLOCK_N * BLOCK_N)
        best = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        sums = tl.zeros([BLOCK_M, BLOCK_VALUE], tl.float32)
        best, total, sums = _attend(
            *(query, is_head, value_dims, best, total, sums),
            *(begin, end, limits, end, scale, key_ptr, value_ptr, table_ptr),
            *(WIDTH, VALUE_WIDTH, BLOCK_WIDTH, PAGE, KEY_STRIDE, KEY_POSITION, VALUE_STRIDE, VALUE_POSITION),
            *(BLOCK_N, False, WINDOW),
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
    WINDOW: tl.constexpr,
):
    """Combine the parts of one head of a row, each rescaled to the largest score of all parts.

    Always add up PARTS parts, some of them empty, so that the order of the additions does not depend on the batch.
    """
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(0)
    length = tl.load(starts_ptr + first_segment + row).to(tl.int32) + 1
    parts, dims = tl.arange(0, PARTS), tl.arange(0, BLOCK_WIDTH)
    if WIDTH > BLOCK_WIDTH:
        dims += tl.program_id(2) * BLOCK_WIDTH
    _, _, count = _parts(length, WINDOW, PARTS)
    is_part, is_dim = parts < count, dims < WIDTH
    place = (row * heads + head) * room + parts
    best = tl.load(marks_ptr + place * 2, is_part, other=float("-inf"))
    total = tl.load(marks_ptr + place * 2 + 1, is_part, other=0.0)
    inside = is_part[:, None] & is_dim[None, :]
    sums = tl.load(sums_ptr + place[:, None] * WIDTH + dims[None, :], inside, other=0.0)
    weights = tl.exp2(best - tl.max(best, 0))
    mixed = tl.sum(sums * weights[:, None], 0) / tl.sum(total * weights, 0)
    target = output_ptr + ((first_token + row) * heads + head) * WIDTH + dims
    tl.store(target, mixed.to(output_ptr.dtype.element_ty), is_dim)
