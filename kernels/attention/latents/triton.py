"""The operation of reference.py: torch's library expands the latents, and a Triton kernel attends.

The latents of a block of positions are expanded into a scratch tensor, and the kernel attends to the block. Between the
blocks of a segment, memory holds the online softmax: each query's largest score, total weight and weighted sums.
Blocks are cut at absolute positions, and products have sizes that depend only on the segment itself, so a segment's
result does not depend on the rest of the batch.
"""

import math

import torch
from torch import Tensor
from triton import language as tl

from baton.kernels.attention.latents.sizes import block_positions
from baton.kernels.attention.latents.tiles import prefill_config
from baton.kernels.attention.paged import tiles
from baton.kernels.runtime.triton import launch
from baton.kernels.runtime.triton.jit import jit
from baton.kernels.runtime.triton.layout import row_stride
from baton.kernels.runtime.triton.sizes import cdiv


def attend_by_heads(
    query: Tensor,
    latents: Tensor,
    pages: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    scale: float,
    first: int,
    length: int,
    start: int,
    output: Tensor,
) -> None:
    """Compute reference.attend_by_heads. `query` and `latents` may be strided in their first dimension.

    Scratch memory: latents of sizes.block_positions(page_size) positions and their keys and values by head, in query's
    dtype, and heads · (value + 2) float32 numbers for each token. All of it is allocated for any segment, so that a
    warm-up measures it.
    """
    (heads, width), (_, rank, own) = query.shape[1:], key_weight.shape
    page_size, columns = latents.shape[1], value_weight.shape[1]
    size, end = block_positions(page_size), start + length
    gathered = latents.new_empty(size // page_size, *latents.shape[1:])
    keys, values = query.new_empty(heads, size, own), query.new_empty(heads, size, columns)
    sums = torch.empty(length, heads, columns, dtype=torch.float32, device=query.device)
    marks = torch.empty(length, heads, 2, dtype=torch.float32, device=query.device)
    config = prefill_config(query, value_weight)
    layout = {
        "HEADS": heads,
        "OWN": own,
        "SHARED": width - own,
        "RANK": rank,
        "VALUE_WIDTH": columns,
        "BLOCK_OWN": tiles.block(own),
        "BLOCK_SHARED": tiles.block(width - own),
        "BLOCK_VALUE": tiles.block(columns),
        "SIZE": size,
        "QUERY_STRIDE": row_stride(query),
    }
    for base in range(0, end, size):
        needed = pages[base // page_size : cdiv(min(base + size, end), page_size)]
        _expand(latents, needed, key_weight, value_weight, gathered, keys, values)
        # Only tokens from `base` on see positions of this block.
        unseen = max(base - start, 0)
        grid = (cdiv(length, config.blocks["BLOCK_M"]) - unseen // config.blocks["BLOCK_M"], heads)
        state = (scale / math.log(2), first, length, start, base, sums, marks, output)
        launch(_attend_block, grid, query, keys, gathered, values, *state, config=config, **layout)


def _expand(
    latents: Tensor,
    pages: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    gathered: Tensor,
    keys: Tensor,
    values: Tensor,
) -> None:
    """Copy `pages` of latents to the first of `gathered`, and write the keys and values of their positions.

    gathered: [pages, page_size, 1, rank + shared]. keys: [heads, positions, own]. values: [heads, positions, value].
    """
    heads, rank, _ = key_weight.shape
    stored = gathered[: len(pages)]
    torch.index_select(latents, 0, pages, out=stored)
    count = len(pages) * latents.shape[1]
    latent = stored.view(count, -1)[:, :rank].expand(heads, count, rank)
    torch.bmm(latent, key_weight.detach(), out=keys[:, :count])
    torch.bmm(latent, value_weight.detach().mT, out=values[:, :count])


@jit
def _attend(
    query,
    query_shared,
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
    shared_ptr,
    value_ptr,
    OWN: tl.constexpr,
    SHARED: tl.constexpr,
    RANK: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_OWN: tl.constexpr,
    BLOCK_SHARED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    """Attend to the positions [first, stop) of a block, BLOCK_N at a time; return the updated best, total and sums.

    This is the online softmax of kernels/attention/paged/triton.py, for keys of two parts in contiguous memory. The
    arguments that are not described here are the same as there.

    query: [M, BLOCK_OWN]. query_shared: [M, BLOCK_SHARED], for the part of the keys that all heads share.
    shared_ptr: the latents, whose columns from RANK on are the shared part of the keys.
    """
    dims, shared_dims = tl.arange(0, BLOCK_OWN), tl.arange(0, BLOCK_SHARED)
    for begin in range(first, stop, BLOCK_N):
        positions = begin + tl.arange(0, BLOCK_N)
        is_there = (positions < end)[:, None]
        keys = tl.load(
            key_ptr + (positions * OWN)[:, None] + dims[None, :], is_there & (dims < OWN)[None, :], other=0.0
        )
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
        if SHARED:
            shared_ptrs = shared_ptr + (positions * (RANK + SHARED) + RANK)[:, None] + shared_dims[None, :]
            shared = tl.load(shared_ptrs, is_there & (shared_dims < SHARED)[None, :], other=0.0)
            scores = tl.dot(query_shared, tl.trans(shared), scores, input_precision="ieee")
        scores *= scale
        if not IS_WHOLE:
            scores = tl.where(positions[None, :] < limits[:, None], scores, float("-inf"))
        larger = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - larger[:, None])
        shrink = tl.exp2(best - larger)
        best = larger
        total = total * shrink + tl.sum(weights, 1)
        value_ptrs = value_ptr + (positions * VALUE_WIDTH)[:, None] + value_dims[None, :]
        values = tl.load(value_ptrs, is_there & (value_dims < VALUE_WIDTH)[None, :], other=0.0)
        sums = tl.dot(weights.to(values.dtype), values, sums * shrink[:, None], input_precision="ieee")
    return best, total, sums


@jit
def _attend_block(
    query_ptr,
    key_ptr,
    shared_ptr,
    value_ptr,
    scale,
    origin,
    length,
    start,
    base,
    sums_ptr,
    marks_ptr,
    output_ptr,
    HEADS: tl.constexpr,
    OWN: tl.constexpr,
    SHARED: tl.constexpr,
    RANK: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_OWN: tl.constexpr,
    BLOCK_SHARED: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    SIZE: tl.constexpr,
    QUERY_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend to the positions [base, base + SIZE) with BLOCK_M tokens of a segment, for one head.

    Continue from the tokens' sums and marks unless the block is the first. Write the output if the block is the last
    that the tokens see, else their sums and marks. The last tokens take longest, so the first programs compute them.

    key_ptr, value_ptr: the block's keys, without their shared part, and its values, [HEADS, SIZE, columns] each.
    shared_ptr: [SIZE, RANK + SHARED], its latents; the columns from RANK on are the shared part of the keys.
    origin: the segment's first token within the batch.
    start: that token's absolute position.
    marks_ptr: [length, HEADS, 2], the largest score of each token and head so far, and the total weight.
    """
    head = tl.program_id(1).to(tl.int64)
    first = (tl.cdiv(length, BLOCK_M) - 1 - tl.program_id(0)) * BLOCK_M
    rows, dims, shared_dims = first + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_OWN), tl.arange(0, BLOCK_SHARED)
    value_dims = tl.arange(0, BLOCK_VALUE)
    is_row = rows < length
    query_ptr += head * (OWN + SHARED)
    query_ptrs = query_ptr + (origin + rows).to(tl.int64)[:, None] * QUERY_STRIDE
    query = tl.load(query_ptrs + dims[None, :], is_row[:, None] & (dims < OWN)[None, :], other=0.0)
    is_shared = is_row[:, None] & (shared_dims < SHARED)[None, :]
    query_shared = tl.load(query_ptrs + OWN + shared_dims[None, :], is_shared, other=0.0)
    # Positions relative to the block: the end of what the tokens see, its part within the block, the end for each
    # token, and the first position that needs a mask.
    sight = start + tl.minimum(first + BLOCK_M, length) - base
    end = tl.minimum(sight, SIZE)
    limits = tl.minimum(start + rows + 1 - base, end)
    whole = tl.minimum(tl.maximum(start + first + 1 - base, 0), end) // BLOCK_N * BLOCK_N
    place = rows.to(tl.int64) * HEADS + head
    is_sum = is_row[:, None] & (value_dims < VALUE_WIDTH)[None, :]
    sums_ptrs = sums_ptr + place[:, None] * VALUE_WIDTH + value_dims[None, :]
    is_later = is_row & (base > 0)
    best = tl.load(marks_ptr + place * 2, is_later, other=float("-inf"))
    total = tl.load(marks_ptr + place * 2 + 1, is_later, other=0.0)
    sums = tl.load(sums_ptrs, is_sum & (base > 0), other=0.0)
    key_ptr += head * SIZE * OWN
    value_ptr += head * SIZE * VALUE_WIDTH
    best, total, sums = _attend(
        *(query, query_shared, value_dims, best, total, sums, 0, whole, limits, end, scale),
        *(key_ptr, shared_ptr, value_ptr, OWN, SHARED, RANK, VALUE_WIDTH, BLOCK_OWN, BLOCK_SHARED, BLOCK_N, True),
    )
    best, total, sums = _attend(
        *(query, query_shared, value_dims, best, total, sums, whole, end, limits, end, scale),
        *(key_ptr, shared_ptr, value_ptr, OWN, SHARED, RANK, VALUE_WIDTH, BLOCK_OWN, BLOCK_SHARED, BLOCK_N, False),
    )
    if sight > SIZE:
        tl.store(marks_ptr + place * 2, best, is_row)
        tl.store(marks_ptr + place * 2 + 1, total, is_row)
        tl.store(sums_ptrs, sums, is_sum)
    else:
        target = ((origin + rows).to(tl.int64) * HEADS + head) * VALUE_WIDTH
        attended = (sums / total[:, None]).to(output_ptr.dtype.element_ty)
        tl.store(output_ptr + target[:, None] + value_dims[None, :], attended, is_sum)
