"""Triton's interpreter without what its tests here do not need: half of its time.

It relies on private names of Triton 3.7, which constraints.txt pins; where one is missing, that part stays as it is.
"""

import inspect
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
from triton.language import core
from triton.runtime import interpreter


def make_quick() -> None:
    """Speed up the interpreter of this process."""
    leave_out_overflow_checks()
    remember_dtypes()
    remember_builtins()


def leave_out_overflow_checks() -> None:
    """Leave out the check, in 64 bits, that follows each addition and product of integers."""
    builder = getattr(interpreter, "interpreter_builder", None)
    if builder is not None:
        builder.options = replace(builder.options, sanitize_overflow=False)


def remember_dtypes() -> None:
    """Remember numpy's dtype of each scalar type, for which the interpreter makes a dictionary each time."""
    if not hasattr(interpreter, "_get_np_dtype"):
        return
    of_scalar, pointer = cache(interpreter._get_np_dtype), np.dtype(np.uint64)

    def dtype_of(type: core.dtype) -> np.dtype[Any]:
        return pointer if isinstance(type.scalar, core.pointer_type) else of_scalar(type.scalar)

    interpreter._get_np_dtype = dtype_of


def remember_builtins() -> None:
    """Remember the built-in functions of each module, which the interpreter looks for at each launch."""
    if not hasattr(interpreter, "_patch_builtin"):
        return

    @cache
    def builtins_of(package: ModuleType | type) -> list[tuple[str, Any]]:
        return [(name, member) for name, member in inspect.getmembers(package) if core.is_builtin(member)]

    def patch(package: ModuleType | type, builder: Any, scope: Any) -> None:
        for name, member in builtins_of(package):
            interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch
