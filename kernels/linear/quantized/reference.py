"""Projections with weights stored as 8- or 4-bit integers and one scale per group of inputs, and embedding look-up."""

import torch
from torch import Tensor
from torch.nn import functional as F

from baton.kernels.linear.quantized.forms import INTEGERS, Groups

GROUP = 64
"""Number of consecutive inputs that share a scale."""
SIZES = {8: (1.0,), 4: (1.0, 0.95, 0.9, 0.85)}
"""Factors of a scale that `quantize` tries, by bits. With 4 bits, clipping the largest weights can lower the error."""


def quantize(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Round a weight [outputs, inputs] to integers of 8 or 4 bits with scales: weight ≈ codes · scales.

    Among the scales that SIZES allows, each group gets the one with the smallest squared error.

    Return codes, int8 [outputs, groups·GROUP] with zeros for padding inputs, and scales, bfloat16 [outputs, groups].
    The weight of largest magnitude in a group maps to -2^(bits-1), so a scale may be negative.
    """
    padded = F.pad(weight.detach().float(), (0, -weight.shape[1] % GROUP))
    groups = padded.view(len(weight), -1, GROUP)
    low, high = groups.amin(2), groups.amax(2)
    largest = torch.where(high > -low, high, low)
    scales, *others = (_scales(largest, bits, size) for size in SIZES[bits])
    least = _error(groups, scales, bits) if others else largest
    for other in others:
        error = _error(groups, other, bits)
        scales, least = torch.where(error < least, other, scales), torch.minimum(error, least)
    return _round(groups, scales, bits).to(torch.int8).flatten(1), scales.bfloat16()


def grouped(codes: Tensor, scales: Tensor, bits: int) -> Groups:
    """Return the results of `quantize` as Groups."""
    return Groups(INTEGERS[bits], codes, scales)


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """Return codes · scales, exact in float32: [outputs, groups·GROUP]."""
    groups = codes.view(*scales.shape, GROUP).float()
    return (groups * scales.float()[:, :, None]).flatten(1)


def linear(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Return x @ dequantize(codes, scales)ᵀ + bias, [T, outputs] in x's dtype, computed in float32.

    x: [T, inputs]. bias: [outputs] or None.
    """
    y = x.float() @ dequantize(codes, scales)[:, : x.shape[1]].t()
    return (y if bias is None else y + bias.float()).to(x.dtype)


def look_up(tokens: Tensor, codes: Tensor, scales: Tensor, inputs: int, dtype: torch.dtype) -> Tensor:
    """Return dequantize(codes, scales)[tokens] in `dtype`: [T, inputs]; tokens: int64 [T]."""
    return dequantize(codes[tokens], scales[tokens])[:, :inputs].to(dtype)


def _scales(largest: Tensor, bits: int, size: float) -> Tensor:
    """Return size · largest / -2^(bits-1), rounded to bfloat16 but stored as float32; 1 for groups of zeros."""
    scales = (largest * (-size / 2 ** (bits - 1))).bfloat16().float()
    return torch.where(scales == 0, 1.0, scales)


def _round(groups: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Return groups / scales, rounded to the nearest integer of `bits` bits, in float32; groups: [.., .., GROUP]."""
    return (groups / scales[:, :, None]).round_().clamp_(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _error(groups: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Return each group's squared quantization error."""
    return _round(groups, scales, bits).mul_(scales[:, :, None]).sub_(groups).square_().sum(2)
