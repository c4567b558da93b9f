"""Projections with weights of bfloat16 that take 12 bits each, and the format in which such a weight is stored.

The weight [outputs, inputs] is divided into blocks of 32 outputs, and each block into units of 4 inputs, both padded.
data: the offset of each block and of the end, in bytes, int64; padding to 64 bytes; then the blocks. A block has
- its table: 16 upper bytes of weights, that is, signs with exponents without their last bit;
- the number of its units that are kept whole, and their indices, int32; padding to 64 bytes;
- its units, in order.
A unit has 64 bytes of codes, then 64 lower bytes for each of two steps of 2 inputs. A code is the place of a weight's
upper byte in the table, in the lower half of its byte for the first step and in the upper half for the second.
A unit that is kept whole is bfloat16 [2 steps, 32 outputs, 2 inputs]. A unit within which the inputs end is whole, too.
"""

import torch
from torch import Tensor

from baton.kernels.linear.dense import reference

BLOCK, UNIT, TABLE, LINE = 32, 4, 16, 64
UNIT_BYTES, WHOLE_BYTES = 192, 256


def linear(x: Tensor, data: Tensor, shape: tuple[int, int], bias: Tensor | None) -> Tensor:
    """Return x @ weightᵀ + bias, as dense.reference does, for a compressed weight of this shape."""
    return reference.linear(x, plain(data, shape), bias)


def look_up(tokens: Tensor, data: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return rows `tokens` of a compressed weight of this shape."""
    return reference.look_up(tokens, plain(data, shape))


def plain(data: Tensor, shape: tuple[int, int]) -> Tensor:
    """Decompress a weight of shape [outputs, inputs]."""
    outputs, inputs = shape
    offsets = data[: 8 * -(-outputs // BLOCK)].view(torch.int64).tolist()
    blocks = [_block(data[offset:], -(-inputs // UNIT)) for offset in offsets]
    return torch.cat(blocks)[:outputs, :inputs]


def _block(data: Tensor, units: int) -> Tensor:
    """Decompress a block: [BLOCK, units · UNIT]."""
    table, count = data[:TABLE].long(), int(data[TABLE : TABLE + 4].view(torch.int32))
    whole = set(data[TABLE + 4 : TABLE + 4 + 4 * count].view(torch.int32).tolist())
    at, found = aligned(TABLE + 4 + 4 * count), list[Tensor]()
    for unit in range(units):
        size = WHOLE_BYTES if unit in whole else UNIT_BYTES
        stored, at = data[at : at + size], at + size
        found.append(stored.view(torch.int16).view(2, BLOCK, 2) if unit in whole else _unit(stored, table))
    steps = torch.cat(found)  # [steps, BLOCK, 2]
    return steps.transpose(0, 1).reshape(BLOCK, -1).view(torch.bfloat16)


def _unit(stored: Tensor, table: Tensor) -> Tensor:
    """Decompress a unit: int16 [2 steps, BLOCK, 2], the bits of its weights."""
    codes, lower = stored[:64], stored[64:].view(2, 64)
    upper = table[torch.stack([codes & 15, codes >> 4]).long()]
    numbers = (upper << 8 | lower).to(torch.int16)
    # In memory: [step, quarter of the outputs' halves, half, output within the quarter, input]. See place() in unit.h.
    return numbers.view(2, 4, 2, 4, 2).transpose(1, 2).reshape(2, BLOCK, 2)


def aligned(size: int) -> int:
    """Round a size in bytes up to whole cache lines."""
    return -(-size // LINE) * LINE
