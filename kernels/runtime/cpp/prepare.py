"""From sources to a library that can be installed: the target, the compiler, the cache."""

import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from baton.kernels.runtime.cpp import library
from baton.kernels.runtime.cpp.build import build, key
from baton.kernels.runtime.cpp.cache import CacheError, cache_folder, fetch, open_folder
from baton.kernels.runtime.cpp.compiler import Compiler, find_compiler
from baton.kernels.runtime.cpp.targets import Target, cpu_features, machine, usable_targets


@dataclass(slots=True)
class Prepared:
    """What became of the native code. problem: why torch runs in its stead; empty if it does not.

    operations: those that it is for, by the names of their folders; None for all.
    seconds: that it took. cache_problem: why the library will not be kept, and lies in `private` until it is loaded.
    """

    operations: Collection[str] | None = None
    target: Target | None = None
    compiler: Compiler | None = None
    path: Path | None = None
    compiled: bool = False
    seconds: float = 0.0
    problem: str = ""
    cache_problem: str = ""
    private: TemporaryDirectory[str] | None = None
    left_out: dict[str, str] = field(default_factory=dict)

    def install(self, threads: int) -> None:
        """Load the library, if there is one, and check it; afterwards left_out names the functions that failed."""
        with self._told():
            if self.path is not None:
                self.left_out = library.install(self.path, threads, self.operations)
        if self.private is not None:
            self.private.cleanup()

    def find(self, on_compile: Callable[["Prepared"], None]) -> None:
        with self._told():
            self._find(on_compile)

    def _find(self, on_compile: Callable[["Prepared"], None]) -> None:
        targets = usable_targets(machine(), cpu_features()) if sys.platform != "win32" else []
        if not targets:
            self.problem = f"there is no target for this CPU ({machine()} on {sys.platform})"
            return
        target = self.target = targets[0]
        compiler = self.compiler = find_compiler()
        if compiler is None:
            self.problem = "there is no C++ compiler (CXX, c++, g++, clang++, or Zig's: pip install ziglang)"
            return

        def compile_to(path: Path) -> None:
            self.compiled = True
            on_compile(self)
            build(compiler, target, path, self.operations)

        self.path = fetch(self._folder(), key(compiler, target, self.operations), compile_to)

    def _folder(self) -> Path:
        """The cache, or a private folder where that cannot be used."""
        folder = cache_folder()
        try:
            open_folder(folder)
        except CacheError as error:
            self.cache_problem = str(error)
            self.private = TemporaryDirectory(prefix="baton-")
            return Path(self.private.name)
        return folder

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Whatever goes wrong is a problem to tell of, for torch can do the same."""
        began = time.monotonic()
        try:
            yield
        except Exception as error:
            self.problem = str(error) or type(error).__name__
        self.seconds += time.monotonic() - began


def prepare(
    operations: Collection[str] | None = None, on_compile: Callable[[Prepared], None] = lambda prepared: None
) -> Prepared:
    """Find or build the library for this CPU; what is wrong is told in the result, which then is to be installed.

    operations: see Prepared. on_compile: called before a compilation, which takes seconds.
    """
    prepared = Prepared(operations)
    prepared.find(on_compile)
    return prepared
