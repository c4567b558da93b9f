"""FP8 weights: e4m3 numbers that are multiplied by a scale of their block, their row or the tensor."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import repeat

import torch
from torch import Tensor

from baton.models.loading.formats.composed import FLOATS, ROWS_AT_ONCE, Composed, Misfit, Pool, Read, bytes_in
from baton.models.loading.shards import StoredTensor

SCALES = ("_scale_inv", "_scale")
"""Suffixes of a weight's name in the name of its scale. Despite "_inv", weights are multiplied by either scale."""
FP8 = "F8_E4M3"
Block = tuple[int, int]
"""Rows and columns that share a scale."""


@dataclass(frozen=True, kw_only=True)
class ScaledFloats(Composed):
    """An e4m3 weight and its scale."""

    block: Block | None  # None: the scale is one of the whole weight or of each row

    def values(self, read: Read, dtype: torch.dtype) -> Tensor:
        weight, scale = self.sources
        return dequantize(read(weight), read(scale), self.block, dtype)


def fp8(block: Block | None) -> Callable[[StoredTensor, Pool], ScaledFloats | None]:
    """Return the function that finds e4m3 weights. All of them must have a scale."""

    def find(weight: StoredTensor, pool: Pool) -> ScaledFloats | None:
        if weight.dtype != FP8 or weight.name.endswith(SCALES):
            return None
        scale = next((pool[weight.name + end] for end in SCALES if weight.name + end in pool), None)
        if scale is None:
            raise Misfit(f"{weight.name} has no scale")
        if scale.dtype not in FLOATS:
            raise Misfit(f"{scale.name} has the dtype {scale.dtype}")
        if not _fits(weight.shape, scale.shape, block):
            raise Misfit(f"{scale.name} {list(scale.shape)} does not fit {list(weight.shape)}")
        sources = weight, scale
        return ScaledFloats(
            weight.file, weight.name, weight.shape, "FP8", stop=bytes_in(sources), sources=sources, block=block
        )

    return find


def _fits(weight: tuple[int, ...], scale: tuple[int, ...], block: Block | None) -> bool:
    """Return whether a scale of this shape has one value for the whole weight, one per row, or one per block."""
    if len(weight) < 2:
        return False
    if math.prod(scale) == 1 or scale in (weight[:-1], (*weight[:-1], 1)):
        return True
    return block is not None and scale == (*weight[:-2], -(-weight[-2] // block[0]), -(-weight[-1] // block[1]))


def dequantize(weight: Tensor, scale: Tensor, block: Block | None, dtype: torch.dtype) -> Tensor:
    """Multiply each value of the weight by the scale of its block, its row or the tensor, in float32; round to `dtype`.

    Blocks at the lower and right edges may be incomplete. Except for the result, only a few rows take memory at a time.
    """
    height, factors = _factors(weight.shape, scale.float(), block)
    result = torch.empty(weight.shape, dtype=dtype)
    parts = zip(torch.split(weight, height, -2), factors, torch.split(result, height, -2), strict=False)
    for values, factor, part in parts:
        part.copy_(values.float().mul_(factor))
    return result


def _factors(shape: torch.Size, scale: Tensor, block: Block | None) -> tuple[int, Iterable[Tensor]]:
    """Return how many rows to process at a time, and the factors for each of these groups of rows."""
    if scale.numel() == 1:
        return ROWS_AT_ONCE, repeat(scale.reshape(()))
    if scale.shape in (shape[:-1], (*shape[:-1], 1)):
        return ROWS_AT_ONCE, torch.split(scale.reshape(*shape[:-1], 1), ROWS_AT_ONCE, -2)
    assert block is not None
    rows, columns = min(block[0], shape[-2]), min(block[1], shape[-1])  # Files may state blocks of any size.
    return rows, torch.split(scale.repeat_interleave(columns, dim=-1)[..., : shape[-1]], 1, -2)
