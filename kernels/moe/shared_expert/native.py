"""The operation of reference.py in C++ (cpu.cpp)."""

import torch
from torch import Tensor

from baton.kernels.moe.shared_expert import reference
from baton.kernels.runtime import cpp
from baton.kernels.runtime.cpp import INT, INT64, POINTER, TYPES
from baton.kernels.runtime.cpp.checks import assert_agrees

NAME = "baton_add_shared"


def takes(routed: Tensor, shared: Tensor, gate: Tensor | None = None) -> bool:
    """Return whether the C function is installed and takes these tensors."""
    tensors = [routed, shared, *([] if gate is None else [gate])]
    return (
        cpp.function(NAME) is not None
        and routed.dtype in TYPES
        and all(x.is_cpu and x.dtype == routed.dtype and x.is_contiguous() for x in tensors)
    )


def add_shared(routed: Tensor, shared: Tensor, gate: Tensor | None = None) -> Tensor:
    """Compute reference.add_shared; only for arguments that `takes` accepts."""
    run = cpp.function(NAME)
    assert run is not None
    y = torch.empty_like(routed)
    at = None if gate is None else gate.data_ptr()
    run(TYPES[routed.dtype], routed.data_ptr(), shared.data_ptr(), at, y.data_ptr(), *routed.shape)
    return y


def check() -> None:
    """Raise AssertionError if the C function differs from the reference."""
    g = torch.Generator().manual_seed(0)
    routed, shared, gate = (torch.randn(shape, generator=g) for shape in ((3, 74), (3, 74), (3, 1)))
    for dtype, tolerance in zip(TYPES, (1e-5, 2**-7), strict=True):
        for rounded in (None, gate.to(dtype)):
            found = add_shared(routed.to(dtype), shared.to(dtype), rounded)
            expected = reference.add_shared(routed.to(dtype), shared.to(dtype), rounded)
            assert_agrees(found, expected, rtol=tolerance, atol=1e-6)


cpp.declare(NAME, [INT, POINTER, POINTER, POINTER, POINTER, INT64, INT64], check)
