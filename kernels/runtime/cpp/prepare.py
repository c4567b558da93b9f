"""Preparation of the native library: choice of the target, look-up in the wheel and the cache, compilation."""

import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from baton.kernels.runtime.cpp import library
from baton.kernels.runtime.cpp.build import OBJECTS, PREBUILT, build, key, prebuilt_key
from baton.kernels.runtime.cpp.cache import CacheError, cache_folder, fetch, find, open_folder
from baton.kernels.runtime.cpp.compiler import CompileError, Compiler, find_compiler
from baton.kernels.runtime.cpp.targets import AMX, Target, machine, targets_here


@dataclass(slots=True)
class Prepared:
    """The native library of this process, how it was found or built, and what went wrong."""

    operations: Collection[str] | None = None  # folders of the operations in the library; None: all
    target: Target | None = None
    compiler: Compiler | None = None  # None if none was found, and if none was needed
    path: Path | None = None  # path of the library
    prebuilt: bool = False  # the library was installed with the wheel
    compiled: bool = False  # the library was not in the cache, so it was compiled
    seconds: float = 0.0  # spent on finding, building, loading and checking the library
    problem: str = ""  # why torch's forms run instead; empty if native code runs
    cache_problem: str = ""  # why the cache cannot be used; the library then lies in `private` until it is loaded
    private: TemporaryDirectory[str] | None = None
    left_out: dict[str, str] = field(default_factory=dict)  # reason why each unused function is left out

    def install(self, threads: int) -> None:
        """Load the library, if there is one, and check its functions; left_out receives the functions that failed."""
        with self._recorded():
            if self.path is not None:
                self._install(self.path, threads)
        if self.private is not None:
            self.private.cleanup()

    def _install(self, path: Path, threads: int) -> None:
        """Load a library. If it is the wheel's and cannot be loaded here, build one. Exceptions are recorded."""
        try:
            self.left_out = library.install(path, threads, self.operations)
        except library.LoadError:
            if not self.prebuilt:
                raise
            self.path, self.prebuilt = None, False
            self._build(targets_here(), lambda prepared: None)
            if self.path is not None:
                self.left_out = library.install(self.path, threads, self.operations)

    def find(self, on_compile: Callable[["Prepared"], None]) -> None:
        """Find the library in the wheel or the cache, or build it. on_compile: called before a compilation."""
        with self._recorded():
            self._find(on_compile)

    def _find(self, on_compile: Callable[["Prepared"], None]) -> None:
        """Choose the target, and set `path`. Exceptions are recorded by the caller."""
        targets = targets_here() if sys.platform != "win32" else []
        if not targets:
            self.problem = f"there is no target for this CPU ({machine()} on {sys.platform})"
            return
        if self._use_prebuilt(targets[:1]):
            return
        self.compiler = find_compiler()
        if self.compiler is None and self._use_prebuilt(targets[1:]):
            return
        self._build(targets, on_compile)

    def _build(self, targets: list[Target], on_compile: Callable[["Prepared"], None]) -> None:
        """Fetch the library from the cache or build it, and set `path`. Exceptions are recorded by the caller."""
        self.target, self.compiler = targets[0], find_compiler()
        if self.compiler is None:
            self.problem = "there is no C++ compiler (CXX, c++, g++, clang++, or Zig's: pip install ziglang)"
            return
        folder = self._folder()
        try:
            self.path = self._fetch(folder, self.compiler, self.target, on_compile)
        except CompileError:
            if not self.target.needs >= AMX:
                raise
            self.target = targets[1]  # The assembler may be too old for AMX.
            self.path = self._fetch(folder, self.compiler, self.target, on_compile)

    def _use_prebuilt(self, targets: list[Target]) -> bool:
        """Set `path` to the wheel's library for the first of these targets that it has. Return whether it has one."""
        for target in targets:
            # A library of other sources, in a checkout that was changed after its build, has another key.
            if (path := find(PREBUILT, prebuilt_key(target))) is not None:
                self.target, self.path, self.prebuilt = target, path, True
                return True
        return False

    def _fetch(
        self, folder: Path, compiler: Compiler, target: Target, on_compile: Callable[["Prepared"], None]
    ) -> Path:
        """Return the path of the library for a target. Raise CompileError if it must be built and cannot be."""

        def compile_to(path: Path) -> None:
            self.compiled = True
            on_compile(self)
            build(compiler, target, path, self.operations, objects=folder / OBJECTS)

        return fetch(folder, key(compiler, target, self.operations), compile_to)

    def _folder(self) -> Path:
        """Return the cache's folder, or a private temporary one if the cache cannot be used."""
        folder = cache_folder()
        try:
            open_folder(folder)
        except CacheError as error:
            self.cache_problem = str(error)
            self.private = TemporaryDirectory(prefix="baton-")
            return Path(self.private.name)
        return folder

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        """Measure the time, and store any exception as `problem`. It is not fatal: torch's forms run instead."""
        began = time.monotonic()
        try:
            yield
        except Exception as error:
            self.problem = str(error) or type(error).__name__
        self.seconds += time.monotonic() - began


def prepare(
    operations: Collection[str] | None = None, on_compile: Callable[[Prepared], None] = lambda prepared: None
) -> Prepared:
    """Find or build the library for this CPU, and return the result. The caller then calls `install` on it.

    operations: see Prepared.
    on_compile: called before a compilation, which takes seconds.
    """
    prepared = Prepared(operations)
    prepared.find(on_compile)
    return prepared
