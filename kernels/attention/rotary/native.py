"""The operation of reference.py in C++ (cpu.cpp)."""

from itertools import product

import torch
from torch import Tensor

from baton.kernels.attention.rotary import reference
from baton.kernels.runtime import cpp
from baton.kernels.runtime.cpp import INT, INT64, POINTER, TYPES
from baton.kernels.runtime.cpp.checks import assert_agrees

NAME = "baton_rotate"


def takes(x: Tensor, cos: Tensor, sin: Tensor, first: int = 0) -> bool:
    """Return whether the C function is installed and takes these tensors."""
    return (
        cpp.function(NAME) is not None
        and x.dtype in TYPES
        and all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in (x, cos, sin))
        and cos.dtype == sin.dtype == torch.float32
        and cos.shape == sin.shape == (len(x), 1, cos.shape[2])
        and 0 <= first <= x.shape[2] - cos.shape[2]
    )


def rotate(x: Tensor, cos: Tensor, sin: Tensor, first: int = 0) -> Tensor:
    """Compute reference.rotate; only for arguments that `takes` accepts."""
    run = cpp.function(NAME)
    assert run is not None
    y = torch.empty_like(x)
    run(TYPES[x.dtype], x.data_ptr(), cos.data_ptr(), sin.data_ptr(), y.data_ptr(), *x.shape, first, cos.shape[2])
    return y


def check() -> None:
    """Raise AssertionError if the C function differs from the reference."""
    g = torch.Generator().manual_seed(0)
    x, angle = torch.randn(3, 2, 74, generator=g), torch.randn(3, 1, 37, generator=g).repeat(1, 1, 2)
    for (dtype, tolerance), beyond in product(zip(TYPES, (1e-5, 2**-7), strict=True), ((0, 0), (7, 12))):
        before, after = beyond
        heads = torch.cat([x[..., :before], x, x[..., :after]], dim=-1).to(dtype)
        arguments = heads, angle.cos(), angle.sin(), before
        assert_agrees(rotate(*arguments), reference.rotate(*arguments), rtol=tolerance, atol=1e-5)


cpp.declare(NAME, [INT, POINTER, POINTER, POINTER, POINTER, *(INT64,) * 5], check)
