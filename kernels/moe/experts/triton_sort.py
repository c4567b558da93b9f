"""Pairs of a token and one of its experts, sorted by expert and cut into tiles: all on the device.

How many each expert has is read by no host, so there are as many tiles as there could be; those left over are empty.
"""

import torch
import triton
from torch import Tensor
from triton import language as tl

from baton.kernels.runtime.triton import KernelConfig, launch
from baton.kernels.runtime.triton.jit import jit

AT_ONCE = 1024
"""Pairs that a program looks at."""


def sort_pairs(chosen: Tensor, count: int, tile_rows: int) -> tuple[Tensor, Tensor]:
    """order: int32 [pairs], those of expert 0 first, then of 1, as they come; tiles: int32 [most, 3], the expert of
    each, its first place in the order, and how many follow there, at most tile_rows, or 0.

    chosen: int32 [T, k]; an expert that is not one of `count` is left out, and what then is last in `order` undefined.
    """
    pairs, bins = chosen.numel(), triton.next_power_of_2(count)
    most = most_tiles(pairs, count, tile_rows)
    counts, order, tiles = (
        torch.empty(shape, dtype=torch.int32, device=chosen.device) for shape in ((count,), (pairs,), (most, 3))
    )
    launch(_count, (count,), chosen, counts, pairs, config=KernelConfig(), AT_ONCE=AT_ONCE)
    launch(
        _place,
        (count,),
        *(chosen, counts, order, tiles, pairs, most),
        config=KernelConfig(),
        COUNT=count,
        BINS=bins,
        TILE_ROWS=tile_rows,
        AT_ONCE=AT_ONCE,
    )
    return order, tiles


def most_tiles(pairs: int, count: int, tile_rows: int) -> int:
    """However they are chosen: each expert that has any may leave a tile all but empty."""
    return (pairs + min(pairs, count) * (tile_rows - 1)) // tile_rows


@jit
def _count(chosen_ptr, counts_ptr, pairs, AT_ONCE: tl.constexpr):
    """Programs: experts."""
    expert = tl.program_id(0)
    mine = tl.zeros((AT_ONCE,), tl.int32)
    for start in range(0, pairs, AT_ONCE):
        at = start + tl.arange(0, AT_ONCE)
        mine += (tl.load(chosen_ptr + at, at < pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(mine))


@jit
def _place(
    chosen_ptr,
    counts_ptr,
    order_ptr,
    tiles_ptr,
    pairs,
    most,
    COUNT: tl.constexpr,
    BINS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Programs: experts; the last also empties the tiles that are left over."""
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.load(counts_ptr + bins, bins < COUNT, other=0)
    of_tiles = (counts + TILE_ROWS - 1) // TILE_ROWS
    first = tl.sum(tl.where(bins < expert, counts, 0))
    rows = tl.sum(tl.where(bins == expert, counts, 0))
    tile = tl.sum(tl.where(bins < expert, of_tiles, 0))
    placed = first
    for start in range(0, pairs, AT_ONCE):
        at = start + tl.arange(0, AT_ONCE)
        mine = (tl.load(chosen_ptr + at, at < pairs, other=-1) == expert).to(tl.int32)
        tl.store(order_ptr + placed + tl.cumsum(mine) - 1, at, mine == 1)
        placed += tl.sum(mine)
    for begin in range(0, rows, TILE_ROWS):
        tl.store(tiles_ptr + tile * 3, expert)
        tl.store(tiles_ptr + tile * 3 + 1, first + begin)
        tl.store(tiles_ptr + tile * 3 + 2, tl.minimum(rows - begin, TILE_ROWS))
        tile += 1
    if expert == COUNT - 1:
        for empty in range(tile, most):
            tl.store(tiles_ptr + empty * 3 + 2, 0)
