"""Libraries of this checkout's kernels for tests, each compiled once per run."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from baton.kernels.runtime import cpp
from baton.kernels.runtime.cpp import library
from baton.kernels.runtime.cpp.build import OBJECTS, build, key
from baton.kernels.runtime.cpp.cache import cache_folder, fetch, open_folder
from baton.kernels.runtime.cpp.compiler import Compiler, find_compiler
from baton.kernels.runtime.cpp.targets import AMX, TARGETS, V4_BF16, Target, cpu_features, targets_here

# A compiler that takes as long as a copy: its objects are empty, and it "links" what this run has compiled already.
COPIES = """#!/bin/sh
for last; do :; done
case "$*" in --version) echo "copies 1.0";; *-shared*) cp {library} "$last";; *) : > "$last";; esac
"""
# -O1, since unrolling all loops with sanitizers would take minutes.
SANITIZED = ("-O1", "-g1", "-fno-var-tracking", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def compiler() -> Compiler:
    found = find_compiler()
    assert found is not None, "these tests need a C++ compiler"
    return found


def runnable() -> list[Target]:
    """Return the targets whose instructions this CPU supports, the best first."""
    return targets_here()


def usual() -> Target:
    """Return the target of tests that choose none: the best, or AMX, emulated, if BATON_EMULATE_AMX is set."""
    return emulated()[0] if "BATON_EMULATE_AMX" in os.environ else runnable()[0]


def emulated() -> list[Target]:
    """Return the target with AMX, whose instructions are emulated, if this CPU lacks only them."""
    features = cpu_features()
    if not features >= V4_BF16 or features >= AMX:
        return []
    amx = next(target for target in TARGETS if target.needs >= AMX)
    return [replace(amx, name=f"{amx.name}-emulated", march=(*amx.march, "-DBATON_EMULATE_AMX"))]


@cache
def library_for(target: Target | None = None) -> Path:
    """Return the library for a target (None: `usual()`).

    The library is built with sanitizers if BATON_SANITIZE is set. Otherwise that of the target that a server on this
    machine would use shares its objects with the servers of other tests; those of other targets are compiled with all
    warnings as errors.
    """
    chosen, found, folder = target or usual(), compiler(), cache_folder()
    kind, extra = "", tuple[str, ...]()
    if "BATON_SANITIZE" in os.environ:
        kind, extra = "-sanitized", ("-Wextra", "-Werror", *SANITIZED)
    elif chosen != runnable()[0]:
        kind, extra = "-checked", ("-Wextra", "-Werror")
    open_folder(folder)
    objects = folder / f"{OBJECTS}{kind}"
    with patch.dict(os.environ):
        os.environ.pop("LD_PRELOAD", None)  # With the sanitizers' runtimes a compiler takes several times as long.
        return fetch(
            folder, f"{key(found, chosen)}{kind}", lambda path: build(found, chosen, path, None, extra, objects)
        )


def copying_compiler(folder: Path) -> Path:
    """Return a compiler, made in `folder`, that takes no time: it links a copy of `library_for()`."""
    path = folder / "copies"
    path.write_text(COPIES.format(library=library_for()))
    path.chmod(0o755)
    return path


def rounds_operands() -> bool:
    """Return whether the installed library rounds operands of products to bfloat16 for inputs in it, as AMX does."""
    file = cpp.installed_file()
    return file is not None and file.name.startswith("x86-64-v4-amx")


def as_multiplied(weights: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Return float32 weights of integers as the installed library multiplies them with inputs of a dtype.

    AMX rounds those of 8 bits to bfloat16, to nearest, ties away from zero, for inputs in bfloat16.
    """
    if bits != 8 or dtype != torch.bfloat16 or not rounds_operands():
        return weights
    return (weights.contiguous().view(torch.int32) + 0x8000 & -0x10000).view(torch.float32)


_agreed = set[tuple[Path, str]]()
"""Libraries and functions that have agreed with their references in this process."""


@contextmanager
def installed(target: Target | None = None, threads: int = 1) -> Iterator[None]:
    """Install this checkout's C++. Each function is checked once per process: checks take most of the time."""
    path = library_for(target)
    functions = {
        name: replace(each, check=int) if (path, name) in _agreed else each for name, each in library._declared.items()
    }
    with patch.object(library, "_declared", functions):
        assert cpp.install(path, threads) == {}
    _agreed.update((path, name) for name in functions)
    try:
        yield
    finally:
        cpp.uninstall()
