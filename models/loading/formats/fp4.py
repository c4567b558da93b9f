"""Weights of 4-bit floats (e2m1), two in a byte, with a scale for each 16 inputs (NVFP4) or 32 inputs (MXFP4)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.models.loading.formats.composed import (
    Composed,
    Misfit,
    Pool,
    Read,
    bytes_in,
    check_shape,
    companion,
    looked_up,
    nibbles,
    parts_of_rows,
)
from baton.models.loading.formats.fp8 import FP8
from baton.models.loading.shards import StoredTensor

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""The numbers of the 16 codes."""
NVFP4, MXFP4 = 16, 32
"""Inputs that share a scale."""
EXPONENTS = ("U8", "F8_E8M0")
"""Dtypes of scales that are powers of two."""


@dataclass(frozen=True, kw_only=True)
class FourBitFloats(Composed):
    """A weight of 4-bit floats [.., outputs, inputs]. Its sources: the codes, the scales, and of NVFP4 a global scale.

    A scale is e4m3 times or divided by the global scale, or a power of two.
    """

    divides: bool = False  # whether scales are divided by the global scale

    def values(self, read: Read, dtype: torch.dtype) -> Tensor:
        inputs = self.shape[-1]
        packed = read(self.sources[0]).reshape(-1, inputs // 2)
        scales = read(self.sources[1]).reshape(len(packed), -1)
        shared = read(self.sources[2]).float().reshape(()) if len(self.sources) == 3 else None
        result = torch.empty(len(packed), inputs, dtype=dtype)
        for rows in parts_of_rows(len(packed)):
            numbers = looked_up(E2M1, nibbles(packed[rows])).view(-1, scales.shape[1], inputs // scales.shape[1])
            result[rows] = numbers.mul_(self._scales(scales[rows], shared).unsqueeze(2)).flatten(1)
        return result.view(self.shape)

    def _scales(self, scales: Tensor, shared: Tensor | None) -> Tensor:
        """Return scales in float32."""
        if shared is None:
            return scales.view(torch.float8_e8m0fnu).float()
        return scales.float() / shared if self.divides else scales.float() * shared


def find_modelopt(packed: StoredTensor, pool: Pool) -> FourBitFloats | None:
    """Find NVFP4 of modelopt: bytes as the weight itself, and a global scale by which scales are multiplied."""
    if packed.dtype != "U8" or not packed.name.endswith(".weight"):
        return None
    shared = companion(pool, packed, f"{packed.name}_scale_2", ["F32"])
    return nvfp4(packed.name, packed, shared, pool, divides=False)


def find_compressed(packed: StoredTensor, pool: Pool) -> FourBitFloats | None:
    """Find NVFP4 and MXFP4 of compressed-tensors. NVFP4 has a global scale, by which scales are divided."""
    name = packed.name.removesuffix("_packed")
    if packed.dtype != "U8" or name == packed.name:
        return None
    if f"{name}_global_scale" in pool:
        return nvfp4(name, packed, companion(pool, packed, f"{name}_global_scale", ["F32"]), pool, divides=True)
    if name + "_scale" in pool and pool[name + "_scale"].dtype == FP8:
        raise Misfit(f"{packed.name} has no weight_global_scale: {name}_global_scale is missing")
    return mxfp4(name, packed, companion(pool, packed, f"{name}_scale", EXPONENTS), packed.shape)


def find_blocks(packed: StoredTensor, pool: Pool) -> FourBitFloats | None:
    """Find MXFP4 of transformers: `_blocks` [.., outputs, blocks, bytes] and `_scales` [.., outputs, blocks]."""
    name = packed.name.removesuffix("_blocks")
    if packed.dtype != "U8" or name == packed.name:
        return None
    if len(packed.shape) < 3 or packed.shape[-1] != MXFP4 // 2:
        raise Misfit(f"{packed.name} {list(packed.shape)} should have blocks of {MXFP4 // 2} bytes")
    flat = *packed.shape[:-2], packed.shape[-2] * packed.shape[-1]
    return mxfp4(name, packed, companion(pool, packed, f"{name}_scales", EXPONENTS), flat)


def nvfp4(name: str, packed: StoredTensor, shared: StoredTensor, pool: Pool, divides: bool) -> FourBitFloats:
    """Return a weight of NVFP4."""
    scales = companion(pool, packed, f"{name}_scale", [FP8])
    check_shape(scales, scales_of(packed, packed.shape, NVFP4))
    if math.prod(shared.shape) != 1:
        raise Misfit(f"{shared.name} {list(shared.shape)} should be one number")
    return four_bits(name, packed.shape, "NVFP4", (packed, scales, shared), divides)


def mxfp4(name: str, packed: StoredTensor, scales: StoredTensor, shape: tuple[int, ...]) -> FourBitFloats:
    """Return a weight of MXFP4. shape: of its bytes, [.., outputs, inputs / 2]."""
    check_shape(scales, scales_of(packed, shape, MXFP4))
    return four_bits(name, shape, "MXFP4", (packed, scales), divides=False)


def scales_of(packed: StoredTensor, shape: tuple[int, ...], block: int) -> tuple[int, ...]:
    """Return the shape of the scales of bytes of this shape. Raises Misfit if blocks do not fill rows."""
    if len(shape) < 2 or not shape[-1] or shape[-1] * 2 % block:
        raise Misfit(f"{packed.name} {list(packed.shape)} should have rows of blocks of {block} inputs")
    return *shape[:-1], shape[-1] * 2 // block


def four_bits(
    name: str, shape: tuple[int, ...], kind: str, sources: tuple[StoredTensor, ...], divides: bool
) -> FourBitFloats:
    """Return a weight. shape: of its bytes."""
    whole = *shape[:-1], 2 * shape[-1]
    stop = bytes_in(sources)
    return FourBitFloats(sources[0].file, name, whole, kind, stop=stop, sources=sources, divides=divides)
