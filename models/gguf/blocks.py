"""The block formats of GGUF: groups of integers with a scale, as ggml-quants.c of ggml defines them.

A block has the numbers of one row that follow one another. All scales are float16. Each function takes the bytes of
blocks, uint8 [blocks, bytes], and returns their values, float32 [blocks, elements].
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

AT_ONCE = 1 << 12  # blocks that are dequantized at once, so that temporary numbers stay in the caches


@dataclass(frozen=True)
class BlockFormat:
    """A block format."""

    elements: int  # of a block
    bytes: int
    values: Callable[[Tensor], Tensor]

    def dequantize(self, data: Tensor) -> Tensor:
        """Return the values of blocks, float32 [elements]. data: their bytes, uint8."""
        blocks = data.view(-1, self.bytes)
        found = torch.empty(len(blocks), self.elements, dtype=torch.float32)
        for at in range(0, len(blocks), AT_ONCE):
            found[at : at + AT_ONCE] = self.values(blocks[at : at + AT_ONCE])
        return found.view(-1)


def _scale(blocks: Tensor, at: int) -> Tensor:
    """Return the float16 at a byte of each block, float32 [blocks, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Return the low halves of bytes, then the high halves: [..., n] → [..., 2n]."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """Return the 32 bits from a byte of each block on, as 0 or 16: [blocks, 32]."""
    bits = blocks[:, at : at + 4].unsqueeze(2) >> torch.arange(8, dtype=torch.uint8)
    return ((bits & 1) << 4).flatten(1)


def q8_0(blocks: Tensor) -> Tensor:
    return _scale(blocks, 0) * blocks[:, 2:].contiguous().view(torch.int8)


def q4_0(blocks: Tensor) -> Tensor:
    return _scale(blocks, 0) * (_nibbles(blocks[:, 2:]).to(torch.int8) - 8)


def q4_1(blocks: Tensor) -> Tensor:
    return _scale(blocks, 0) * _nibbles(blocks[:, 4:]) + _scale(blocks, 2)


def q5_0(blocks: Tensor) -> Tensor:
    return _scale(blocks, 0) * ((_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)).to(torch.int8) - 16)


def q5_1(blocks: Tensor) -> Tensor:
    return _scale(blocks, 0) * (_nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)) + _scale(blocks, 2)


def _scales_of_k(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the 6-bit scales and minima of a block's eight groups, each [blocks, 8]. packed: [blocks, 12]."""
    first, second, last = torch.split(packed, 4, dim=1)
    scales = torch.cat([first & 63, (last & 15) | ((first >> 6) << 4)], dim=1)
    minima = torch.cat([second & 63, (last >> 4) | ((second >> 6) << 4)], dim=1)
    return scales.float(), minima.float()


def _of_eight_groups(blocks: Tensor, integers: Tensor) -> Tensor:
    """Return the values of blocks with eight scales and minima. integers: [blocks, 8, 32]."""
    scales, minima = _scales_of_k(blocks[:, 4:16])
    scales, minima = _scale(blocks, 0) * scales, _scale(blocks, 2) * minima
    return (scales.unsqueeze(2) * integers - minima.unsqueeze(2)).flatten(1)


def q4_k(blocks: Tensor) -> Tensor:
    return _of_eight_groups(blocks, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).view(-1, 8, 32))


def q5_k(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32)
    high = (blocks[:, 16:48].unsqueeze(1) >> torch.arange(8, dtype=torch.uint8).view(8, 1)) & 1
    return _of_eight_groups(blocks, low | (high << 4))


def q6_k(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    integers = (low | (high << 4)).to(torch.int8) - 32
    scales = _scale(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8)
    values: Tensor = scales.unsqueeze(2) * integers.view(-1, 16, 16)
    return values.flatten(1)


BLOCKS = {
    "Q8_0": BlockFormat(32, 34, q8_0),
    "Q4_0": BlockFormat(32, 18, q4_0),
    "Q4_1": BlockFormat(32, 20, q4_1),
    "Q5_0": BlockFormat(32, 22, q5_0),
    "Q5_1": BlockFormat(32, 24, q5_1),
    "Q4_K": BlockFormat(256, 144, q4_k),
    "Q5_K": BlockFormat(256, 176, q5_k),
    "Q6_K": BlockFormat(256, 210, q6_k),
}
"""The formats that are read, by their names."""
