"""The operation of reference.py in C++ (cpu.cpp), over the packed weights of kernels/linear/quantized."""

import torch
from torch import Tensor

from baton.kernels.linear.int8_activations import reference
from baton.kernels.linear.quantized.forms import Form
from baton.kernels.linear.quantized.native import ARGUMENTS, CHECKED, linear_with, packed, random_groups
from baton.kernels.runtime import cpp
from baton.kernels.runtime.cpp import POINTER, TYPES
from baton.kernels.runtime.cpp.checks import assert_agrees

LINEAR = "baton_int8_activations_linear"
PAYS = "baton_int8_activations_pay"


def pays() -> bool:
    """Return whether the C functions are installed, for a target with an instruction for products of 8-bit integers."""
    run, answer = cpp.function(PAYS), torch.zeros(1, dtype=torch.int64)
    if run is not None and cpp.function(LINEAR) is not None:
        run(answer.data_ptr())
    return bool(answer)


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


def check_pays() -> None:
    """Raise AssertionError if the answer is not 0 or 1."""
    run, answer = cpp.function(PAYS), torch.full((1,), -1)
    assert run is not None
    run(answer.data_ptr())
    assert answer.item() in (0, 1)


cpp.declare(LINEAR, ARGUMENTS, check)
cpp.declare(PAYS, [POINTER], check_pays)
