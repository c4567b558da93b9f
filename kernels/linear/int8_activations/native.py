"""The operation of reference.py in C++ (cpu.cpp), over the packed weights of kernels/linear/quantized."""

import torch
from torch import Tensor

from baton.kernels.linear.int8_activations import reference
from baton.kernels.linear.quantized.forms import Form
from baton.kernels.linear.quantized.native import ARGUMENTS, CHECKED, linear_with, packed, random_groups
from baton.kernels.runtime import cpp
from baton.kernels.runtime.cpp import TYPES
from baton.kernels.runtime.cpp.checks import assert_agrees

LINEAR = "baton_int8_activations_linear"


def is_installed() -> bool:
    """Return whether the C function is installed."""
    return cpp.function(LINEAR) is not None


def linear(x: Tensor, data: Tensor, form: Form, outputs: int, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Compute reference.linear, in `out` if it is given. data: the packed weight.

    Raise ValueError for other dtypes and layouts.
    """
    return linear_with(LINEAR, x, data, form, outputs, bias, out)


def check() -> None:
    """Raise AssertionError if the C function differs from the reference."""
    generator = torch.Generator().manual_seed(0)
    for form in CHECKED:
        inputs = 151 if form.span == 1 else form.width
        groups = random_groups(form, 45, inputs, generator)
        for dtype in TYPES:
            bias = torch.randn(45, generator=generator).to(dtype)
            for rows in (1, 5, 14):
                x = torch.randn(rows, inputs, generator=generator).to(dtype)
                found, expected = linear(x, packed(groups), form, 45, bias), reference.linear(x, groups, bias)
                tolerance = 1e-4 if dtype == torch.float32 else 0.05
                assert_agrees(found, expected, rtol=tolerance, atol=tolerance)


cpp.declare(LINEAR, ARGUMENTS, check)
