"""Projections by weights kept as integers with a scale for each group of inputs, and rows of them."""

import torch
from torch import Tensor
from torch.nn import functional as F

GROUP = 64
"""Inputs that share a scale."""
SIZES = {8: (1.0,), 4: (1.0, 0.95, 0.9, 0.85)}
"""Of a scale, to choose from: with few integers it pays to cut off the largest weights."""


def quantize(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Integers of 8 or 4 bits and their scales, those of the smallest squared error: weight ≈ codes · scales.

    weight: [outputs, inputs] → codes: int8 [outputs, groups·GROUP], those of inputs that are not there 0; scales:
    bfloat16 [outputs, groups]. The largest weight of a group is -2^(bits-1), so a scale may be negative.
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


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """float32 [outputs, groups·GROUP], exactly codes · scales."""
    groups = codes.view(*scales.shape, GROUP).float()
    return (groups * scales.float()[:, :, None]).flatten(1)


def linear(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """x @ dequantize(codes, scales)ᵀ + bias, computed in float32, in x's dtype; x: [T, inputs]; bias: [outputs]."""
    y = x.float() @ dequantize(codes, scales)[:, : x.shape[1]].t()
    return (y if bias is None else y + bias.float()).to(x.dtype)


def look_up(tokens: Tensor, codes: Tensor, scales: Tensor, inputs: int, dtype: torch.dtype) -> Tensor:
    """dequantize(codes, scales)[tokens] in `dtype`; tokens: int64 [T] → [T, inputs]."""
    return dequantize(codes[tokens], scales[tokens])[:, :inputs].to(dtype)


def _scales(largest: Tensor, bits: int, size: float) -> Tensor:
    """What bfloat16 holds of them, in float32; 1 for a group of zeros."""
    scales = (largest * (-size / 2 ** (bits - 1))).bfloat16().float()
    return torch.where(scales == 0, 1.0, scales)


def _round(groups: Tensor, scales: Tensor, bits: int) -> Tensor:
    """The nearest integers, in float32; groups: [.., GROUP]."""
    return (groups / scales[:, :, None]).round_().clamp_(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _error(groups: Tensor, scales: Tensor, bits: int) -> Tensor:
    return _round(groups, scales, bits).mul_(scales[:, :, None]).sub_(groups).square_().sum(2)
