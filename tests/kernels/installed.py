"""Libraries of this checkout's kernels for tests: each compiled once a run."""

from pathlib import Path

from kernels.native.build import build, key
from kernels.native.cache import cache_folder, fetch, open_folder
from kernels.native.compiler import Compiler, find_compiler
from kernels.native.targets import Target, cpu_features, machine, usable_targets


def compiler() -> Compiler:
    found = find_compiler()
    assert found is not None, "these tests need a C++ compiler"
    return found


def runnable() -> list[Target]:
    """The targets whose instructions this CPU has, the best first."""
    return usable_targets(machine(), cpu_features())


def library_for(target: Target | None = None) -> Path:
    """The library for a target, by default the one that a server here uses."""
    chosen, found = target or runnable()[0], compiler()
    open_folder(cache_folder())
    return fetch(cache_folder(), key(found, chosen), lambda path: build(found, chosen, path))
