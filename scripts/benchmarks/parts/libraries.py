"""Native code of this checkout and of another revision, which make the same calls in turns, in one process.

    scripts/benchmarks/parts/libraries.py ROOT TARGET FILE

As a program, it builds the library of the checkout in ROOT for a target.
"""

import ctypes
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT)]
if __name__ == "__main__":
    from scripts.launch import import_from

    import_from(Path(sys.argv[1]))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from baton.kernels.runtime import cpp  # noqa: E402
from baton.kernels.runtime.cpp.build import build  # noqa: E402
from baton.kernels.runtime.cpp.compiler import find_compiler  # noqa: E402
from baton.kernels.runtime.cpp.targets import targets_here  # noqa: E402
from scripts.benchmarks.common.revisions import check_out  # noqa: E402


class Library:
    """A shared library of native code. Several can be loaded at once; each has threads of its own."""

    def __init__(self, path: Path, threads: int) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.baton_use_threads(ctypes.c_int(threads))

    def function(self, name: str) -> Callable[..., None]:
        """Return a function that takes what this checkout's function of that name takes."""
        found = getattr(self._library, name)
        found.argtypes, found.restype = cpp.argtypes(name), None
        return found  # type: ignore[no-any-return]


def library_of(revision: str, target: str, threads: int) -> Library:
    """Build a revision's native code for a target, and load it. Raises CalledProcessError if this is impossible."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{target}.so"
        tree = check_out(revision, "kernels", Path(folder))
        subprocess.run([sys.executable, "-P", __file__, str(tree), target, str(path)], check=True)
        return Library(path, threads)


class Calls:
    """Calls of native functions, recorded once and then made by any library: of `products` with x."""

    def __init__(self, products: Callable[[Tensor], Tensor], x: Tensor, count: int) -> None:
        self._calls: list[tuple[str, tuple[Any, ...]]] = []
        self._inputs = x  # The calls have its address.
        with cpp.watched(lambda name, arguments: self._calls.append((name, arguments))):
            self._outputs = [products(x) for _ in range(count)]

    def seconds(self, library: Library) -> float:
        """Make all calls, and return the mean time of one."""
        calls = [(library.function(name), arguments) for name, arguments in self._calls]
        began = time.perf_counter()
        for function, arguments in calls:
            function(*arguments)
        return (time.perf_counter() - began) / len(calls)

    def results(self, library: Library) -> list[Tensor]:
        """Make all calls, and return copies of what they write; NaN where they write nothing."""
        for output in self._outputs:
            output.fill_(torch.nan)
        self.seconds(library)
        return [output.clone() for output in self._outputs]


def in_turns(calls: Calls, libraries: Sequence[Library], rounds: int) -> list[tuple[float, ...]]:
    """Return the seconds of a call by each library in each round, without the first round."""
    found = []
    for number in range(rounds + 1):
        seconds = {library: calls.seconds(library) for library in libraries[:: 1 if number % 2 else -1]}
        found.append(tuple(seconds[library] for library in libraries))
    return found[1:]


def agree(calls: Calls, first: Library, second: Library) -> bool:
    """Return whether two libraries give the same results, bit by bit."""
    return all(map(torch.equal, calls.results(first), calls.results(second)))


def main(target: str, path: Path) -> None:
    compiler, chosen = find_compiler(), next(each for each in targets_here() if each.name == target)
    assert compiler is not None
    build(compiler, chosen, path)


if __name__ == "__main__":
    main(sys.argv[2], Path(sys.argv[3]))
