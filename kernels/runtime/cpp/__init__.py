"""Compiled kernels: builds, caches, loads and checks them. An operation's native.py declares its functions."""

from baton.kernels.runtime.cpp.library import (
    Function,
    address_of_words,
    argtypes,
    declare,
    declared,
    function,
    install,
    installed_file,
    uninstall,
    use_threads,
    watched,
)
from baton.kernels.runtime.cpp.types import FLOAT, INT, INT64, POINTER, TYPES

__all__ = [
    "FLOAT",
    "INT",
    "INT64",
    "POINTER",
    "TYPES",
    "Function",
    "address_of_words",
    "argtypes",
    "declare",
    "declared",
    "function",
    "install",
    "installed_file",
    "uninstall",
    "use_threads",
    "watched",
]
