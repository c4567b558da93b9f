"""The operation of reference.py in C++ (cpu.cpp)."""

import torch
from torch import Tensor

from baton.kernels.attention.mla_cache import reference
from baton.kernels.runtime import cpp
from baton.kernels.runtime.cpp import FLOAT, INT, INT64, POINTER, TYPES
from baton.kernels.runtime.cpp.checks import assert_agrees

NAME = "baton_write_latents"
ARGUMENTS = [INT, POINTER, INT64, POINTER, FLOAT, POINTER, INT64, POINTER, *(INT64,) * 4]


def takes(projected: Tensor, weight: Tensor, eps: float, pages: Tensor) -> bool:
    """Return whether the C function is installed and takes these tensors."""
    return (
        cpp.function(NAME) is not None
        and projected.device.type == "cpu"
        and projected.dtype == weight.dtype == pages.dtype
        and projected.dtype in TYPES
    )


def write_latents(projected: Tensor, weight: Tensor, eps: float, pages: Tensor, places: Tensor) -> None:
    """Compute reference.write_latents. Raise ValueError for layouts that the C function does not take.

    `projected` and `pages` may be strided in their first dimension.
    """
    (tokens, width), page_size, run = projected.shape, pages.shape[1], cpp.function(NAME)
    assert run is not None
    if pages.shape[1:] != (page_size, 1, width) or not pages[:1].is_contiguous() or projected.stride(1) != 1:
        raise ValueError(f"{tuple(pages.shape)} with strides {pages.stride()} are not pages of {width}")
    if len(weight) > width or not weight.is_contiguous():
        raise ValueError(f"weight is {tuple(weight.shape)} for latents of {width}")
    if places.dtype != torch.int64 or places.shape != (tokens,) or not places.is_contiguous():
        raise ValueError(f"places must be {tokens} contiguous int64 numbers")
    run(
        *(TYPES[projected.dtype], projected.data_ptr(), projected.stride(0), weight.data_ptr(), eps),
        *(pages.data_ptr(), pages.stride(0), places.data_ptr(), tokens, page_size, len(weight), width),
    )


def check() -> None:
    """Raise AssertionError if the C function differs from the reference."""
    g, places = torch.Generator().manual_seed(0), torch.tensor([9, 2, 5])
    for dtype, tolerance in zip(TYPES, (1e-5, 0.02), strict=True):
        projected, weight = torch.randn(3, 45, generator=g).to(dtype), torch.randn(37, generator=g).to(dtype)
        found, expected = torch.zeros(2, 4, 3, 1, 45, dtype=dtype)
        write_latents(projected, weight, 1e-5, found, places)
        reference.write_latents(projected, weight, 1e-5, expected, places)
        assert_agrees(found, expected, rtol=tolerance, atol=tolerance)


cpp.declare(NAME, ARGUMENTS, check)
