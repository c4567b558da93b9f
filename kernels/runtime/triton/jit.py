"""Compilation of kernels: once for a model, independent of the batch."""

import inspect
from collections.abc import Callable
from typing import Any

import triton
from triton import language as tl


def jit(function: Callable[..., Any]) -> Any:
    """Apply triton.jit so that no numeric argument triggers another compilation. Pointer arguments must be named …_ptr.

    Values that the model fixes (widths, strides, groups) are constexprs, so that loads know their alignment. Values
    that depend on the batch (rows, tokens) are plain numbers. By default Triton would compile a kernel again when such
    a number is 1 or divisible by 16, which would stall a request.
    """
    parameters = inspect.signature(function).parameters.values()
    numbers = [p.name for p in parameters if p.annotation is not tl.constexpr and not p.name.endswith("_ptr")]
    return triton.jit(function, do_not_specialize=numbers)
