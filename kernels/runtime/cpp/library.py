"""The one library of this process: its functions, each checked against its reference before it is offered."""

import ctypes
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from baton.kernels.runtime.cpp.pool import use_pool

Function = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Declared:
    """module: where it is declared, for most an operation's native.py.

    check: runs the function, which is offered meanwhile, and raises where it and its reference differ.
    """

    module: str
    argtypes: tuple[Any, ...]
    check: Callable[[], None]


class LoadError(Exception):
    """The file cannot be loaded, for instance from a file system mounted noexec."""


_declared: dict[str, Declared] = {}
_functions: dict[str, Function] = {}
_library: ctypes.CDLL | None = None
_watcher: Callable[[str, tuple[Any, ...]], None] | None = None


def declare(name: str, argtypes: Sequence[Any], check: Callable[[], None]) -> None:
    """A C function that an operation would use; called when the operation's native.py is imported."""
    _declared[name] = Declared(check.__module__, tuple(argtypes), check)


def declared(operations: Collection[str] | None = None) -> list[str]:
    """Return the names of all declared functions, or of those that belong to some operations."""
    return sorted(name for name, found in _declared.items() if operations is None or _operation_of(found) in operations)


def _operation_of(declared: Declared) -> str:
    """Return the folder of the declaring module: "mamba2.decode" for baton.kernels.mamba2.decode.native."""
    _, _, *folder, _ = declared.module.split(".")
    return ".".join(folder)


def function(name: str) -> Function | None:
    """The C function; None where nothing is installed, or its check failed."""
    found = _functions.get(name)
    return found if found is None or _watcher is None else partial(_told, _watcher, name)


@contextmanager
def watched(on_call: Callable[[str, tuple[Any, ...]], None]) -> Iterator[None]:
    """Meanwhile functions are not run: on_call is told their names and arguments. In one thread at a time."""
    global _watcher
    assert _watcher is None
    _watcher = on_call
    try:
        yield
    finally:
        _watcher = None


def argtypes(name: str) -> tuple[Any, ...]:
    """Those that the function was declared with."""
    return _declared[name].argtypes


def address_of_words(name: str) -> int:
    """Of the function that takes the same arguments as a row of words: kernels/runtime/cpu_graph/call.h."""
    return ctypes.cast(getattr(_library, f"{name}_of_words"), ctypes.c_void_p).value or 0


def install(path: Path, threads: int, operations: Collection[str] | None = None) -> dict[str, str]:
    """Offer the functions of a library that are declared and pass their checks; why the others are left out, by name.

    operations: those that the library was built for. Once in a process, before a model is used. Raises LoadError.
    """
    global _library
    uninstall()
    try:
        library = ctypes.CDLL(str(path))
        use_pool(library, threads)
    except (OSError, AttributeError) as error:
        raise LoadError(str(error)) from error
    _library = library
    return {name: fault for name in declared(operations) if (fault := _offer(library, name))}


def use_threads(threads: int) -> None:
    """How many torch and native code compute with from now on."""
    torch.set_num_threads(threads)
    if _library is not None:
        use_pool(_library, threads)


def uninstall() -> None:
    """Offer nothing; for tests."""
    global _library
    _library = None
    _functions.clear()


def _told(on_call: Callable[[str, tuple[Any, ...]], None], name: str, *arguments: Any) -> None:
    on_call(name, arguments)


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
