"""The block formats of GGUF: groups of integers with a scale, as ggml-quants.c of ggml defines them.

A block has the numbers of one row that follow one another; it is one span of the format's Form.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from baton.kernels.linear.quantized import Form, Groups

AT_ONCE = 1 << 12  # blocks that are dequantized at once, so that temporary numbers stay in the caches
Fields: TypeAlias = tuple[Tensor | None, ...]
"""The fields of Groups from `codes` on, for blocks as outputs. Fields that a format does not have may be left out."""


@dataclass(frozen=True)
class BlockFormat:
    """A block format. read: function from the bytes of blocks, uint8 [blocks, bytes], to their fields."""

    bytes: int
    form: Form
    read: Callable[[Tensor], Fields]

    @property
    def elements(self) -> int:
        """Numbers of a block."""
        return self.form.width

    def groups(self, data: Tensor, inputs: int) -> Groups:
        """Return the weight [outputs, inputs] that blocks stand for. data: their bytes, uint8."""
        fields = self.read(data.view(-1, self.bytes))
        rows = len(data) // self.bytes * self.elements // inputs
        codes, scales, *others = (None if field is None else field.reshape(rows, -1) for field in fields)
        assert codes is not None and scales is not None
        return Groups(self.form, codes, scales, *others)

    def dequantize(self, data: Tensor) -> Tensor:
        """Return the values of blocks, float32 [elements]. data: their bytes, uint8."""
        parts = torch.split(data, AT_ONCE * self.bytes)
        found = torch.empty(len(data) // self.bytes, self.elements, dtype=torch.float32)
        for at, part in zip(range(0, len(found), AT_ONCE), parts, strict=True):
            found[at : at + AT_ONCE] = self.groups(part, self.elements).numbers()
        return found.view(-1)


def _half(blocks: Tensor, at: int) -> Tensor:
    """Return the float16 at a byte of each block, [blocks, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16)


def _nibbles(packed: Tensor) -> Tensor:
    """Return the low halves of bytes, then the high halves: int8 [..., n] → [..., 2n]."""
    return torch.cat([packed & 15, packed >> 4], dim=-1).view(torch.int8)


def _fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """Return the 32 bits from a byte of each block on, as 0 or 16: int8 [blocks, 32]."""
    bits = blocks[:, at : at + 4].unsqueeze(2) >> torch.arange(8, dtype=torch.uint8)
    return ((bits & 1) << 4).flatten(1).view(torch.int8)


def q8_0(blocks: Tensor) -> Fields:
    return blocks[:, 2:].contiguous().view(torch.int8), _half(blocks, 0)


def q4_0(blocks: Tensor) -> Fields:
    return _nibbles(blocks[:, 2:]) - 8, _half(blocks, 0)


def q4_1(blocks: Tensor) -> Fields:
    return _nibbles(blocks[:, 4:]), _half(blocks, 0), None, -_half(blocks, 2)


def q5_0(blocks: Tensor) -> Fields:
    return (_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)) - 16, _half(blocks, 0)


def q5_1(blocks: Tensor) -> Fields:
    return _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4), _half(blocks, 0), None, -_half(blocks, 2)


def _of_eight_groups(blocks: Tensor, codes: Tensor) -> Fields:
    """Return the fields of blocks with 6-bit factors of eight scales and minima. codes: int8 [blocks, 256]."""
    first, second, last = torch.split(blocks[:, 4:16], 4, dim=1)
    scales = torch.cat([first & 63, (last & 15) | ((first >> 6) << 4)], dim=1)
    minima = torch.cat([second & 63, (last >> 4) | ((second >> 6) << 4)], dim=1)
    return codes, _half(blocks, 0), scales.view(torch.int8), _half(blocks, 2), minima.view(torch.int8)


def q4_k(blocks: Tensor) -> Fields:
    return _of_eight_groups(blocks, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).flatten(1))


def q5_k(blocks: Tensor) -> Fields:
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32)
    high = (blocks[:, 16:48].unsqueeze(1) >> torch.arange(8, dtype=torch.uint8).view(8, 1)) & 1
    return _of_eight_groups(blocks, (low | (high << 4).view(torch.int8)).flatten(1))


def q6_k(blocks: Tensor) -> Fields:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    codes = (low | (high << 4).view(torch.int8)) - 32
    return codes.flatten(1), _half(blocks, 208), blocks[:, 192:208].contiguous().view(torch.int8)


F16 = torch.float16
BLOCKS = {
    "Q8_0": BlockFormat(34, Form(8, 32, dtype=F16), q8_0),
    "Q4_0": BlockFormat(18, Form(4, 32, dtype=F16), q4_0),
    "Q4_1": BlockFormat(20, Form(4, 32, has_minima=True, dtype=F16), q4_1),
    "Q5_0": BlockFormat(22, Form(5, 32, dtype=F16), q5_0),
    "Q5_1": BlockFormat(24, Form(5, 32, has_minima=True, dtype=F16), q5_1),
    "Q4_K": BlockFormat(144, Form(4, 32, span=8, has_minima=True, dtype=F16), q4_k),
    "Q5_K": BlockFormat(176, Form(5, 32, span=8, has_minima=True, dtype=F16), q5_k),
    "Q6_K": BlockFormat(210, Form(6, 16, span=16, dtype=F16), q6_k),
}
"""The formats that are read, by their names."""
