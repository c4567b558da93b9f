"""The choice of the form that computes an operation: Triton on a GPU, compiled C++ where it fits, else torch."""

from collections.abc import Callable
from functools import cache, update_wrapper
from importlib import import_module
from typing import ParamSpec, TypeVar

from torch import Tensor

from baton.kernels.runtime.triton import takes

P = ParamSpec("P")
R = TypeVar("R")


def dispatch(
    reference: Callable[P, R], *forms: tuple[Callable[..., bool], Callable[P, R]], triton: str | None = None
) -> Callable[P, R]:
    """Return the operation that `reference` defines; each call is computed by the first form that takes its arguments.

    reference: runs if no other form takes the arguments. The operation has the reference's signature and docstring.
    forms: pairs (condition, form), tried in order. A condition is called with as many of the operation's positional
        arguments as the condition has parameters.
    triton: a module with a function of the reference's name, which runs if Triton computes on the first argument's
        device. The module is imported at the first such call, because importing Triton takes a second.
    """
    name = reference.__name__

    @cache
    def on_gpu() -> Callable[P, R]:
        form: Callable[P, R] = getattr(import_module(str(triton)), name)
        return form

    sized = [(condition, condition.__code__.co_argcount, form) for condition, form in forms]

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if triton is not None and takes(args[0]):  # type: ignore[arg-type]
            return on_gpu()(*args, **kwargs)
        for condition, count, form in sized:
            if condition(*args[:count]):
                return form(*args, **kwargs)
        return reference(*args, **kwargs)

    return update_wrapper(run, reference)


def on_cpu(tensor: Tensor) -> bool:
    """Decide whether a tensor is in the CPU's memory: a condition for `dispatch`."""
    return tensor.is_cpu
