"""From sources to installed functions: the compiler, the cache, the checks."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from kernels.native.build import build, key
from kernels.native.cache import CacheError, cache_folder, fetch, open_folder
from kernels.native.compiler import CompileError, Compiler, find_compiler
from kernels.native.library import LoadError, install
from kernels.native.targets import Target, cpu_features, machine, usable_targets


@dataclass(slots=True)
class Prepared:
    """What became of the native code. problem: why torch runs in its stead; empty if it does not.

    cache_problem: why the library was not kept. left_out: functions that failed their checks, and how.
    """

    target: Target | None = None
    compiler: Compiler | None = None
    compiled: bool = False
    seconds: float = 0.0
    problem: str = ""
    cache_problem: str = ""
    left_out: dict[str, str] = field(default_factory=dict)


def prepare(threads: int, on_compile: Callable[[Prepared], None] = lambda prepared: None) -> Prepared:
    """Install the native functions for this CPU, compiled first if the cache has none; raises nothing.

    threads: as many as torch has. on_compile: called before a compilation, which takes seconds.
    """
    began = time.monotonic()
    prepared = Prepared()
    try:
        _prepare(prepared, threads, on_compile)
    except (CompileError, LoadError, OSError) as error:
        prepared.problem = str(error)
    prepared.seconds = time.monotonic() - began
    return prepared


def _prepare(prepared: Prepared, threads: int, on_compile: Callable[[Prepared], None]) -> None:
    targets = usable_targets(machine(), cpu_features()) if sys.platform != "win32" else []
    if not targets:
        prepared.problem = f"no target for this CPU ({machine()} on {sys.platform})"
        return
    target = prepared.target = targets[0]
    compiler = prepared.compiler = find_compiler()
    if compiler is None:
        prepared.problem = "no C++ compiler: CXX, c++, g++, clang++ or `pip install ziglang`"
        return

    def compile_to(path: Path) -> None:
        prepared.compiled = True
        on_compile(prepared)
        build(compiler, target, path)

    with _folder(prepared) as folder:
        library = fetch(folder, key(compiler, target), compile_to)
        prepared.left_out = install(library, threads)


@contextmanager
def _folder(prepared: Prepared) -> Iterator[Path]:
    """The cache, or where that cannot be used a private folder that goes when the library has been loaded."""
    folder = cache_folder()
    try:
        open_folder(folder)
    except CacheError as error:
        prepared.cache_problem = str(error)
        with TemporaryDirectory(prefix="baton-") as private:
            yield Path(private)
    else:
        yield folder
