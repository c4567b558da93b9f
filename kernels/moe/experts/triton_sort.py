"""Sorting of (token, expert) pairs by expert, and cutting them into tiles, all on the device.

The host does not read how many pairs each expert has. So the host launches the maximum number of tiles, and tiles that
are not needed are empty.
"""

import torch
from torch import Tensor
from triton import language as tl

from baton.kernels.runtime.triton import KernelConfig, launch
from baton.kernels.runtime.triton.jit import jit
from baton.kernels.runtime.triton.sizes import next_power_of_2

CONFIG = KernelConfig({"AT_ONCE": 1024})
"""The configuration of both kernels. AT_ONCE: pairs that a program reads at a time."""


def sort_pairs(chosen: Tensor, count: int, tile_rows: int) -> tuple[Tensor, Tensor]:
    """Sort pairs by expert, and cut each expert's pairs into tiles of up to tile_rows pairs.

    Return order, int32 [pairs], the numbers of the pairs sorted by expert (stable), and tiles, int32 [most, 3]: each
    tile's expert, its first index in `order`, and its number of pairs, which is 0 for tiles that are not needed.

    chosen: int32 [T, k]. Pairs whose expert is not in [0, count) are left out; the end of `order` is then undefined.
    """
    pairs, bins = chosen.numel(), next_power_of_2(count)
    most = most_tiles(pairs, count, tile_rows)
    counts, order, tiles = (
        torch.empty(shape, dtype=torch.int32, device=chosen.device) for shape in ((count,), (pairs,), (most, 3))
    )
    launch(_count, (count,), chosen, counts, pairs, config=CONFIG)
    launch(
        _place,
        (count,),
        *(chosen, counts, order, tiles, pairs, most),
        config=CONFIG,
        COUNT=count,
        BINS=bins,
        TILE_ROWS=tile_rows,
    )
    return order, tiles


def most_tiles(pairs: int, count: int, tile_rows: int) -> int:
    """Return the most tiles that any choice of experts needs: each expert with pairs may have one nearly empty tile."""
    return (pairs + min(pairs, count) * (tile_rows - 1)) // tile_rows


@jit
def _count(chosen_ptr, counts_ptr, pairs, AT_ONCE: tl.constexpr):
    """Count an expert's pairs. Grid: experts."""
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
    """Write an expert's part of `order` and its tiles. Grid: experts; the last one also empties the unneeded tiles."""
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.load(counts_ptr + bins, bins < COUNT, other=0)
    tile_counts = (counts + TILE_ROWS - 1) // TILE_ROWS
    first = tl.sum(tl.where(bins < expert, counts, 0))
    rows = tl.sum(tl.where(bins == expert, counts, 0))
    tile = tl.sum(tl.where(bins < expert, tile_counts, 0))
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
