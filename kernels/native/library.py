"""The one library of this process: its functions, each checked against its reference before it is offered."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels.native.pool import use_pool

Function = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Declared:
    """check: runs the function, which is offered meanwhile, and raises where it and its reference differ."""

    argtypes: tuple[Any, ...]
    check: Callable[[], None]


class LoadError(Exception):
    """The file cannot be loaded, for instance from a file system mounted noexec."""


_declared: dict[str, Declared] = {}
_functions: dict[str, Function] = {}
_library: ctypes.CDLL | None = None


def declare(name: str, argtypes: Sequence[Any], check: Callable[[], None]) -> None:
    """A C function that an operation would use; called when the operation's native.py is imported."""
    _declared[name] = Declared(tuple(argtypes), check)


def declared() -> list[str]:
    return sorted(_declared)


def function(name: str) -> Function | None:
    """The C function; None where nothing is installed, or its check failed."""
    return _functions.get(name)


def install(path: Path, threads: int) -> dict[str, str]:
    """Offer the functions of a library that are declared and pass their checks; why the others are left out, by name.

    Once in a process, before a model is used. Raises LoadError.
    """
    global _library
    uninstall()
    try:
        library = ctypes.CDLL(str(path))
        use_pool(library, threads)
    except (OSError, AttributeError) as error:
        raise LoadError(str(error)) from error
    _library = library
    return {name: fault for name in declared() if (fault := _offer(library, name))}


def use_threads(threads: int) -> None:
    """From now on; torch's own number must be the same."""
    if _library is not None:
        use_pool(_library, threads)


def uninstall() -> None:
    """Offer nothing; for tests."""
    global _library
    _library = None
    _functions.clear()


def _offer(library: ctypes.CDLL, name: str) -> str:
    """What is wrong with the function; empty if it is offered."""
    try:
        found = getattr(library, name)
        found.argtypes, found.restype = _declared[name].argtypes, None
        _functions[name] = found
        _declared[name].check()
    except Exception as fault:
        _functions.pop(name, None)
        return " ".join(str(fault).split()) or type(fault).__name__
    return ""
