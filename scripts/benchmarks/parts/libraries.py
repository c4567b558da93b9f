"""Native code of this checkout and of another revision, which make the same calls in turns, in one process.

    scripts/benchmarks/parts/libraries.py ROOT TARGET FILE

As a program, it builds the library of the checkout in ROOT for a target, and prints the types of its functions'
arguments.
"""

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
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


class Library:
    """A shared library of native code. Several can be loaded at once; each has threads of its own.

    revision: the library's, for messages.
    types: the types of its functions' arguments, as `signature` returns them; None: they are this checkout's.
    """

    def __init__(
        self,
        path: Path,
        threads: int,
        revision: str = "this checkout",
        types: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self._library, self._revision, self._types = ctypes.CDLL(str(path)), revision, types
        self._find("baton_use_threads")(ctypes.c_int(threads))

    def function(self, name: str) -> Callable[..., None]:
        """Return the function of this name. Raises SystemExit unless it takes what this checkout's function takes."""
        found = self._find(name)
        if self._types is not None and self._types.get(name) != signature(name):
            raise SystemExit(f"{self._revision}: {name} has other types of arguments than in this checkout")
        found.argtypes, found.restype = cpp.argtypes(name), None
        return found  # type: ignore[no-any-return]

    def _find(self, name: str) -> Any:
        try:
            return getattr(self._library, name)
        except AttributeError:
            raise SystemExit(f"{self._revision} has no function {name}") from None


def signature(name: str) -> list[str]:
    """Return the names of the types of a declared function's arguments."""
    return [each.__name__ for each in cpp.argtypes(name)]


def library_of(revision: str, tree: Path, target: str, threads: int) -> Library:
    """Build a revision's native code for a target, and load it. Raises SystemExit if this is impossible.

    tree: a folder with the revision's `kernels`, which also gets the library, and temporary files of the build.
    """
    path = tree / f"{target}.so"
    command = [sys.executable, "-P", __file__, str(tree), target, str(path)]
    # The process that builds is killed if this one ends, and cannot remove its temporary files.
    environment = os.environ | {"TMPDIR": str(tree)}
    built = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace")
    if built.returncode:
        reason = (built.stderr.strip() or f"exit code {built.returncode}").splitlines()[-1]
        raise SystemExit(f"{revision}: native code for {target} cannot be built: {reason}")
    return Library(path, threads, revision, json.loads(built.stdout))


class Calls:
    """Calls of native functions, recorded once and then made by any library: of `products` with x."""

    def __init__(self, products: Callable[[Tensor], Tensor], x: Tensor, count: int) -> None:
        self._calls: list[tuple[str, tuple[Any, ...]]] = []
        self._inputs = products, x  # The calls have the addresses of x and of the weights that `products` keeps.
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


def main(tree: Path, target: str, path: Path) -> None:
    compiler, chosen = find_compiler(), next((each for each in targets_here() if each.name == target), None)
    if compiler is None or chosen is None:
        sys.exit("no C++ compiler" if compiler is None else "no such target of this revision on this CPU")
    for file in (tree / "kernels").rglob("native.py"):
        import_module(".".join(("baton", *file.relative_to(tree).with_suffix("").parts)))
    build(compiler, chosen, path)
    print(json.dumps({name: signature(name) for name in cpp.declared()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
