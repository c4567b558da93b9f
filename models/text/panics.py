"""Panics of the tokenizer library as errors, so that they concern one text only."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
PANIC = "PanicException"  # a BaseException, and in no module that could be imported


class TokenizerError(ValueError):
    """An error inside the tokenizer library, such as a regex of the tokenizer that takes too long for a text."""


def without_panics(work: Callable[P, T]) -> Callable[P, T]:
    """Let a function raise TokenizerError instead of the library's panics, which `except Exception` does not catch."""

    @wraps(work)
    def run(*arguments: P.args, **options: P.kwargs) -> T:
        try:
            return work(*arguments, **options)
        except BaseException as error:
            if type(error).__name__ != PANIC:
                raise
            raise TokenizerError(f"the tokenizer failed: {error}") from None

    return run
