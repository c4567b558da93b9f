"""The one native library of this process. A function is offered to its operation only after it agreed with its
reference.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

Function = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Declared:
    """A C function that an operation would like to use."""

    module: str  # name of the declaring module, usually an operation's native.py
    argtypes: tuple[Any, ...]  # ctypes of the function's arguments
    check: Callable[[], None]  # calls the function through its operation; raises if its reference differs


class LoadError(Exception):
    """The library's file cannot be loaded, for example because its file system is mounted noexec."""


_declared: dict[str, Declared] = {}
_functions: dict[str, Function] = {}
_library: ctypes.CDLL | None = None
_watcher: Callable[[str, tuple[Any, ...]], None] | None = None


def declare(name: str, argtypes: Sequence[Any], check: Callable[[], None]) -> None:
    """Declare a C function that an operation would like to use. Called when the operation's native.py is imported.

    argtypes: ctypes of the function's arguments.
    check: raises an exception if the function and its reference differ. `install` calls it while the function is
        offered.
    """
    _declared[name] = Declared(check.__module__, tuple(argtypes), check)


def declared(operations: Collection[str] | None = None) -> list[str]:
    """Return the names of all declared functions, or of the functions of some operations."""
    return sorted(name for name, found in _declared.items() if operations is None or _operation_of(found) in operations)


def _operation_of(declared: Declared) -> str:
    """Return the folder of the declaring module: "mamba2.decode" for baton.kernels.mamba2.decode.native."""
    _, _, *folder, _ = declared.module.split(".")
    return ".".join(folder)


def function(name: str) -> Function | None:
    """Return the C function; None if no library is installed, or the function's check failed."""
    found = _functions.get(name)
    return found if found is None or _watcher is None else partial(_report, _watcher, name)


@contextmanager
def watched(on_call: Callable[[str, tuple[Any, ...]], None]) -> Iterator[None]:
    """Pass calls of functions, by name and arguments, to `on_call` instead of running them. Not thread-safe."""
    global _watcher
    assert _watcher is None
    _watcher = on_call
    try:
        yield
    finally:
        _watcher = None


def argtypes(name: str) -> tuple[Any, ...]:
    """Return the argument types that the function was declared with."""
    return _declared[name].argtypes


def address_of_words(name: str) -> int:
    """Return the address of the function's variant that takes its arguments as an array of 64-bit words.

    kernels/runtime/cpu_graph/call.h defines these variants.
    """
    return ctypes.cast(getattr(_library, f"{name}_of_words"), ctypes.c_void_p).value or 0


def install(path: Path, threads: int, operations: Collection[str] | None = None) -> dict[str, str]:
    """Load a library, and offer each of its declared functions that passes its check. Raise LoadError if loading fails.

    This must happen once per process, before a model is used.

    Return the functions that are not offered, with the reason for each.

    path: the shared library, for a target of `targets_here`, which asks the system for AMX's registers.
    threads: how many threads torch and native code compute with.
    operations: the operations that the library was built for; None for all.
    """
    global _library
    uninstall()
    try:
        library = ctypes.CDLL(str(path))
        _share(library, threads)
    except (OSError, AttributeError) as error:
        raise LoadError(str(error)) from error
    _library = library
    return {name: fault for name in declared(operations) if (fault := _offer(library, name))}


def installed_file() -> Path | None:
    """Return the file of the installed library; its name begins with the target's."""
    return None if _library is None else Path(_library._name)


def use_threads(threads: int) -> None:
    """Set the number of threads that torch and native code compute with."""
    torch.set_num_threads(threads)
    if _library is not None:
        _share(_library, threads)


def uninstall() -> None:
    """Withdraw all functions, so that operations run torch's forms."""
    global _library
    _library = None
    _functions.clear()


def _share(library: ctypes.CDLL, threads: int) -> None:
    """Set the number of threads that a library's loops are shared by. Raise AttributeError if it is no such library."""
    use = library.baton_use_threads
    use.argtypes, use.restype = [ctypes.c_int], None
    use(threads)


def _forget_workers() -> None:
    """Let a process that was just forked compute: it has none of the workers, and perhaps their locks."""
    if _library is not None:
        _library.baton_forget_workers()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_forget_workers)


def _report(on_call: Callable[[str, tuple[Any, ...]], None], name: str, *arguments: Any) -> None:
    """Report a call instead of making it."""
    on_call(name, arguments)


def _offer(library: ctypes.CDLL, name: str) -> str:
    """Check a function and offer it. Return what is wrong with the function, or an empty string."""
    try:
        found = getattr(library, name)
        found.argtypes, found.restype = _declared[name].argtypes, None
        _functions[name] = found  # Offer it before the check, which calls it through its operation.
        _declared[name].check()
    except Exception as fault:
        _functions.pop(name, None)
        return " ".join(str(fault).split()) or type(fault).__name__
    return ""
