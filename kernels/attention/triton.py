"""The same as reference.py, by Triton: pages are read in place, and scores are never kept.

A program computes a tile of a prompt's tokens (flash attention: Dao, 2023, arXiv:2307.08691). A decoding row is split
into parts, which are combined. The query heads that share keys are rows of one tile. Blocks and parts lie by a row's
own positions, whatever else is in the batch and however wide the table: so its result is the same in all of them.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton import language as tl

from kernels.gpu import KernelConfig, config_of, launch
from kernels.gpu.jit import jit
from kernels.gpu.layout import row_stride

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
    apart, and so may pages, and rows of the table.
    """
    _, heads, width = query.shape
    _, page_size, kv_heads, _ = key_pages.shape
    if heads % kv_heads or not key_pages.shape[1:] == value_pages.shape[1:] == (page_size, kv_heads, width):
        raise ValueError(f"pages {tuple(key_pages.shape)} and {tuple(value_pages.shape)} do not fit {heads} of {width}")
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    given = (query, key_pages, value_pages, page_table, row_stride(page_table), scale / math.log(2))
    layout = {
        "GROUP": heads // kv_heads,
        "WIDTH": width,
        "BLOCK_WIDTH": max(16, triton.next_power_of_2(width)),
        "PAGE": page_size,
        "POSITION_STRIDE": kv_heads * width,
        "KEY_STRIDE": row_stride(key_pages),
        "VALUE_STRIDE": row_stride(value_pages),
        "QUERY_STRIDE": row_stride(query),
    }
    if prompts:
        config = _config("prefill", prefill_candidates, query, key_pages)
        grid = (triton.cdiv(longest, config.blocks["BLOCK_M"] // layout["GROUP"]), kv_heads, prompts)
        launch(_prefill, grid, *given, offsets, starts, output, config=config, **layout)
    if prompts < len(page_table):
        _attend_from_rows(given, starts, prompts, output, layout)
    return output


def _attend_from_rows(
    given: tuple[Any, ...], starts: Tensor, prompts: int, output: Tensor, layout: dict[str, int]
) -> None:
    """The segments behind the prompts."""
    query, key_pages, _, page_table, *_ = given
    tokens, heads, width = query.shape
    page_size, kv_heads = key_pages.shape[1:3]
    rows = len(page_table) - prompts
    parts = triton.next_power_of_2(triton.cdiv(PARTS, kv_heads))
    room = min(parts, triton.cdiv(page_table.shape[1] * page_size, SHORTEST.value))
    sums = torch.empty(rows, heads, room, width, dtype=torch.float32, device=query.device)
    marks = torch.empty(rows, heads, room, 2, dtype=torch.float32, device=query.device)
    where = (starts, prompts, tokens - rows, room)
    grid = (kv_heads, rows, min(room, triton.cdiv(PROGRAMS, rows * kv_heads)))
    layout = {**layout, "PARTS": parts, "BLOCK_M": max(16, triton.next_power_of_2(layout["GROUP"]))}
    config = _config("decode", decode_candidates, query, key_pages)
    launch(_decode, grid, *given, *where, sums, marks, config=config, **layout)
    shape = {"WIDTH": width, "BLOCK_WIDTH": layout["BLOCK_WIDTH"], "PARTS": parts}
    config = KernelConfig({}, warps=16) if width > 256 else KernelConfig()
    launch(_combine, (heads, rows), sums, marks, *where, output, config=config, **shape)


def _config(
    kernel: str, candidates: Callable[[int, int, torch.dtype], list[KernelConfig]], query: Tensor, pages: Tensor
) -> KernelConfig:
    (heads, width), (page_size, kv_heads) = query.shape[1:], pages.shape[1:3]
    dtype = str(query.dtype).removeprefix("torch.")
    shape = f"heads={heads} kv_heads={kv_heads} width={width} page={page_size} {dtype}"
    return config_of(f"attention.{kernel}", shape, query.device, *candidates(heads // kv_heads, width, query.dtype))


def prefill_candidates(group: int, width: int, dtype: torch.dtype) -> list[KernelConfig]:
    """The first fits every GPU. BLOCK_M rows (tokens times GROUP heads) pass over BLOCK_N positions at a time."""
    least = triton.next_power_of_2(group)
    if dtype == torch.float32:  # Without tensor cores: large tiles do not fit into registers, unless of many threads.
        sizes = [(16, 16, 4, 2), (32, 16, 8, 1), (32, 16, 8, 2), (32, 32, 8, 2)]
        sizes = [(m, n, min(16, max(warps, least // 4)), stages) for m, n, warps, stages in sizes]
    elif width <= 64:
        sizes = [(128, 64, 8, 3), (128, 64, 4, 3), (128, 128, 8, 3), (64, 64, 4, 3), (128, 32, 4, 3)]
    elif width <= 128:
        sizes = [(128, 32, 8, 3), (128, 64, 8, 3), (128, 64, 8, 2), (128, 128, 8, 2), (64, 64, 4, 2), (64, 32, 4, 3)]
    elif width > 256:  # Latents, which all heads share.
        sizes = [(16, 16, 8, 1)]
    else:
        sizes = [(64, 32, 8, 2), (64, 32, 8, 3), (128, 32, 8, 2), (64, 64, 8, 2)]
    return [KernelConfig({"BLOCK_M": max(m, least), "BLOCK_N": n}, warps, stages) for m, n, warps, stages in sizes]


def decode_candidates(group: int, width: int, dtype: torch.dtype) -> list[KernelConfig]:
    """The first fits every GPU. BLOCK_N positions are read at a time; it divides 128."""
    exact = dtype == torch.float32
    bytes_wanted = 8192 if exact or group > 16 else 16384
    most = max(16, min(128, bytes_wanted // (triton.next_power_of_2(width) * dtype.itemsize)))
    sizes = [(most, 4, 3), (most // 2, 4, 4), (most // 2, 2, 4), (most, 2, 3), (most, 4, 4), (most, 8, 2)]
    if width > 256:
        sizes = [(16, 8, 1)]
    elif exact:
        sizes = [(most, 8, 2), (most, 8, 3), (most, 4, 3), (most, 4, 2)]
    return [KernelConfig({"BLOCK_N": max(16, n)}, warps, stages) for n, warps, stages in sizes]


@jit
def _attend(
    query,
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
    BLOCK_WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    POSITION_STRIDE: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    """Let the query [M, width] attend to the positions from first to stop, a block at a time.

    best, total [M] and sums [M, width]: the largest score, and sums of 2^(score - best) and of values weighed by it.
    limits [M]: a row sees the positions before its own; end: those that are there. IS_WHOLE: all rows see them all.
    """
    columns = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_WIDTH)
    is_dim = (dims < WIDTH)[None, :]
    # A block's pages are looked up while the one before is computed.
    pages = tl.load(table_ptr + (first + columns) // PAGE, first + columns < end, other=0)
    for begin in range(first, stop, BLOCK_N):
        positions = begin + columns
        page, inner = pages.to(tl.int64)[:, None], ((positions % PAGE) * POSITION_STRIDE)[:, None] + dims[None, :]
        is_there = (positions < end)[:, None] & is_dim
        keys = tl.load(key_ptr + page * KEY_STRIDE + inner, is_there, other=0.0)
        following = positions + BLOCK_N
        pages = tl.load(table_ptr + following // PAGE, following < end, other=0)
        scores = tl.dot(query, tl.trans(keys.to(query.dtype)), input_precision="ieee") * scale
        if not IS_WHOLE:
            scores = tl.where(positions[None, :] < limits[:, None], scores, float("-inf"))
        larger = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - larger[:, None])
        kept = tl.exp2(best - larger)
        best = larger
        total = total * kept + tl.sum(weights, 1)
        values = tl.load(value_ptr + page * VALUE_STRIDE + inner, is_there, other=0.0)
        sums = tl.dot(weights.to(values.dtype), values, sums * kept[:, None], input_precision="ieee")
    return best, total, sums


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
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    POSITION_STRIDE: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    QUERY_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A tile of a segment's tokens, of a head that has keys; the last, which takes longest, is begun first."""
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    segment, kv_head = tl.program_id(2), tl.program_id(1)
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
    head = (kv_head * GROUP + rows % GROUP) * WIDTH
    place = (origin + tokens)[:, None]
    query = tl.load(query_ptr + place * QUERY_STRIDE + head[:, None] + dims[None, :], inside, other=0.0)

    key_ptr += kv_head * WIDTH
    value_ptr += kv_head * WIDTH
    table_ptr += segment.to(tl.int64) * table_stride
    limits = start + tokens + 1
    end = start + tl.minimum(first + TOKENS, length)
    whole = (start + first + 1) // BLOCK_N * BLOCK_N
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_WIDTH], tl.float32)
    best, total, sums = _attend(
        *(query, best, total, sums, 0, whole, limits, end, scale, key_ptr, value_ptr, table_ptr),
        *(WIDTH, BLOCK_WIDTH, PAGE, POSITION_STRIDE, KEY_STRIDE, VALUE_STRIDE, BLOCK_N, True),
    )
    best, total, sums = _attend(
        *(query, best, total, sums, whole, end, limits, end, scale, key_ptr, value_ptr, table_ptr),
        *(WIDTH, BLOCK_WIDTH, PAGE, POSITION_STRIDE, KEY_STRIDE, VALUE_STRIDE, BLOCK_N, False),
    )
    sums = sums / total[:, None]
    target = output_ptr + place * (POSITION_STRIDE * GROUP) + head[:, None] + dims[None, :]
    tl.store(target, sums.to(output_ptr.dtype.element_ty), inside)


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
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    POSITION_STRIDE: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    QUERY_STRIDE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Every so many parts of a row, as many as there are programs for it, of a head that has keys."""
    kv_head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length = tl.load(starts_ptr + first_segment + row).to(tl.int32) + 1
    span = _span(length, PARTS)
    rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_WIDTH)
    is_head = rows < GROUP
    inside = is_head[:, None] & (dims < WIDTH)[None, :]
    head = kv_head * GROUP + rows
    query_ptr += (first_token + row) * QUERY_STRIDE
    query = tl.load(query_ptr + head[:, None] * WIDTH + dims[None, :], inside, other=0.0)
    key_ptr += kv_head * WIDTH
    value_ptr += kv_head * WIDTH
    table_ptr += (first_segment + row) * table_stride
    for part in range(tl.program_id(2), tl.cdiv(length, span), tl.num_programs(2)):
        end = tl.minimum((part + 1) * span, length)
        best = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        sums = tl.zeros([BLOCK_M, BLOCK_WIDTH], tl.float32)
        limits = tl.full([BLOCK_M], 0, tl.int32) + end
        best, total, sums = _attend(
            *(query, best, total, sums, part * span, end, limits, end, scale, key_ptr, value_ptr, table_ptr),
            *(WIDTH, BLOCK_WIDTH, PAGE, POSITION_STRIDE, KEY_STRIDE, VALUE_STRIDE, BLOCK_N, False),
        )
        place = (row * (POSITION_STRIDE // WIDTH * GROUP) + head) * room + part
        tl.store(sums_ptr + place[:, None] * WIDTH + dims[None, :], sums, inside)
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
