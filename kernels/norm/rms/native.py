"""The operation of reference.py in C++ (cpu.cpp)."""

import torch
from torch import Tensor

from baton.kernels.norm.rms import reference
from baton.kernels.runtime import cpp
from baton.kernels.runtime.cpp import FLOAT, INT, INT64, POINTER, TYPES
from baton.kernels.runtime.cpp.checks import assert_agrees

NAME = "baton_add_rms_norm"


def takes(residual: Tensor, x: Tensor | None, weight: Tensor) -> bool:
    """Return whether the C function is installed and takes these tensors."""
    tensors = (residual, weight) if x is None else (residual, x, weight)
    return cpp.function(NAME) is not None and all(
        tensor.device.type == "cpu" and tensor.dtype in TYPES and tensor.is_contiguous() for tensor in tensors
    )


def add_rms_norm(
    residual: Tensor, x: Tensor | None, weight: Tensor, eps: float, multiplier: float = 1.0, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Compute reference.add_rms_norm; only for arguments that `takes` accepts."""
    run = cpp.function(NAME)
    assert run is not None
    rows, hidden = residual.shape
    added = residual if x is None else torch.empty_like(residual)
    normed = torch.empty(rows, hidden, dtype=weight.dtype)
    run(
        rows,
        hidden,
        residual.data_ptr(),
        TYPES[residual.dtype],
        None if x is None else x.data_ptr(),
        TYPES[residual.dtype if x is None else x.dtype],
        weight.data_ptr(),
        TYPES[weight.dtype],
        eps,
        multiplier,
        offset,
        added.data_ptr(),
        normed.data_ptr(),
    )
    return added, normed


def check() -> None:
    """Raise AssertionError if the C function differs from the reference."""
    generator = torch.Generator().manual_seed(0)
    for dtype in TYPES:
        residual = torch.randn(96, 217, generator=generator)
        x, weight = torch.randn(96, 217, generator=generator).to(dtype), torch.randn(217, generator=generator).to(dtype)
        for added, offset in ((x, 0.0), (None, 1.0)):
            found = add_rms_norm(residual, added, weight, 1e-5, 0.5, offset)
            expected = reference.add_rms_norm(residual, added, weight, 1e-5, 0.5, offset)
            assert_agrees(found[0], expected[0], rtol=1e-6)
            assert_agrees(found[1], expected[1], rtol=1e-5 if dtype == torch.float32 else 0.01)


cpp.declare(
    NAME,
    [INT64, INT64, POINTER, INT, POINTER, INT, POINTER, INT, FLOAT, FLOAT, FLOAT, POINTER, POINTER],
    check,
)
