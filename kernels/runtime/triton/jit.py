"""How kernels are compiled: once for a model, whatever the batch."""

import inspect
from collections.abc import Callable
from typing import Any

import triton
from triton import language as tl


def jit(function: Callable[..., Any]) -> Any:
    """triton.jit of a kernel whose pointers are named …_ptr. Numbers do not make variants.

    What the model fixes (widths, strides, groups) is a constexpr, from which loads learn how they are aligned; what a
    batch decides (rows, tokens) is a number, and Triton must not compile anew because one is 1 or divisible by 16.
    """
    parameters = inspect.signature(function).parameters.values()
    numbers = [p.name for p in parameters if p.annotation is not tl.constexpr and not p.name.endswith("_ptr")]
    return triton.jit(function, do_not_specialize=numbers)
