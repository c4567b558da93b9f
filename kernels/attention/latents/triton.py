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
from baton.kernels.attention.paged.triton import attend
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

    Scratch memory: keys and values of sizes.block_positions(page_size) positions, in query's dtype, and
    heads · (value + 2) float32 numbers for each token. All of it is allocated for any segment, so that a warm-up
    measures it.
    """
    heads, width = query.shape[1:]
    page_size, columns = latents.shape[1], value_weight.shape[1]
    size, end = block_positions(page_size), start + length
    keys = torch.empty(heads, size, width, dtype=query.dtype, device=query.device)
    values = torch.empty(heads, size, columns, dtype=query.dtype, device=query.device)
    sums = torch.empty(length, heads, columns, dtype=torch.float32, device=query.device)
    marks = torch.empty(length, heads, 2, dtype=torch.float32, device=query.device)
    table = torch.zeros(1, dtype=torch.int32, device=query.device)  # the scratch tensors are one page
    config = prefill_config(query, value_weight)
    layout = {
        "HEADS": heads,
        "WIDTH": width,
        "VALUE_WIDTH": columns,
        "BLOCK_WIDTH": tiles.block(width),
        "BLOCK_VALUE": tiles.block(columns),
        "SIZE": size,
        "QUERY_STRIDE": row_stride(query),
    }
    for base in range(0, end, size):
        stop = min(base + size, end)
        _expand(latents, pages[base // page_size : cdiv(stop, page_size)], key_weight, value_weight, keys, values)
        # Only tokens from `base` on see positions of this block.
        unseen = max(base - start, 0)
        grid = (cdiv(length, config.blocks["BLOCK_M"]) - unseen // config.blocks["BLOCK_M"], heads)
        state = (table, scale / math.log(2), first, length, start, base, sums, marks, output)
        launch(_attend_block, grid, query, keys, values, *state, config=config, **layout)


def _expand(
    latents: Tensor, pages: Tensor, key_weight: Tensor, value_weight: Tensor, keys: Tensor, values: Tensor
) -> None:
    """Write the keys and the values of all positions of `pages` to the first positions of `keys` and `values`.

    keys: [heads, positions, own + shared]. values: [heads, positions, value].
    """
    heads, rank, own = key_weight.shape
    stored = latents.index_select(0, pages).flatten(0, 2).to(keys.dtype)
    count = len(stored)
    latent = stored[:, :rank].expand(heads, count, rank)
    torch.bmm(latent, key_weight.detach(), out=keys[:, :count, :own])
    keys[:, :count, own:] = stored[:, rank:]
    torch.bmm(latent, value_weight.detach().mT, out=values[:, :count])


@jit
def _attend_block(
    query_ptr,
    key_ptr,
    value_ptr,
    table_ptr,
    scale,
    origin,
    length,
    start,
    base,
    sums_ptr,
    marks_ptr,
    output_ptr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    SIZE: tl.constexpr,
    QUERY_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend to the positions [base, base + SIZE) with BLOCK_M tokens of a segment, for one head.

    Continue from the tokens' sums and marks unless the block is the first. Write the output if the block is the last
    that the tokens see, else their sums and marks. The last tokens take longest, so the first programs compute them.

    origin: the segment's first token within the batch.
    start: that token's absolute position.
    marks_ptr: [length, HEADS, 2], the largest score of each token and head so far, and the total weight.
    """
    head = tl.program_id(1).to(tl.int64)
    first = (tl.cdiv(length, BLOCK_M) - 1 - tl.program_id(0)) * BLOCK_M
    rows, dims = first + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_WIDTH)
    value_dims = tl.arange(0, BLOCK_VALUE)
    is_row = rows < length
    query_ptrs = query_ptr + (origin + rows).to(tl.int64)[:, None] * QUERY_STRIDE + (head * WIDTH + dims)[None, :]
    query = tl.load(query_ptrs, is_row[:, None] & (dims < WIDTH)[None, :], other=0.0)
    # Positions relative to the block: where it ends, where the tokens' sight ends, and where a mask becomes necessary.
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
    key_ptr += head * SIZE * WIDTH
    value_ptr += head * SIZE * VALUE_WIDTH
    best, total, sums = attend(
        *(query, is_row, value_dims, best, total, sums, 0, whole, limits, end, scale, key_ptr, value_ptr, table_ptr),
        *(WIDTH, VALUE_WIDTH, BLOCK_WIDTH, SIZE, SIZE * WIDTH, WIDTH, SIZE * VALUE_WIDTH, VALUE_WIDTH, BLOCK_N, True),
    )
    best, total, sums = attend(
        *(query, is_row, value_dims, best, total, sums, whole, end, limits, end, scale, key_ptr, value_ptr, table_ptr),
        *(WIDTH, VALUE_WIDTH, BLOCK_WIDTH, SIZE, SIZE * WIDTH, WIDTH, SIZE * VALUE_WIDTH, VALUE_WIDTH, BLOCK_N, False),
    )
    if sight > SIZE:
        tl.store(marks_ptr + place * 2, best, is_row)
        tl.store(marks_ptr + place * 2 + 1, total, is_row)
        tl.store(sums_ptrs, sums, is_sum)
    else:
        target = ((origin + rows).to(tl.int64) * HEADS + head) * VALUE_WIDTH
        attended = (sums / total[:, None]).to(output_ptr.dtype.element_ty)
        tl.store(output_ptr + target[:, None] + value_dims[None, :], attended, is_sum)
