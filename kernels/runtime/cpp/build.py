"""Compilation of the operations' C++ into one shared library."""

import hashlib
import os
import re
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from baton.kernels.runtime.cpp.cache import find, store
from baton.kernels.runtime.cpp.compiler import FLAGS, Compiler
from baton.kernels.runtime.cpp.targets import Target

KERNELS = Path(__file__).parents[2]
PREBUILT = Path(__file__).parent / "prebuilt"
"""The folder of the libraries that a wheel brings, each with all operations for one target. Sources have none."""
OBJECTS = "objects"
"""Name of the folder, in the cache's, of the compiled sources."""
KEY = 16
"""Characters of the hash in a library's name."""
INCLUDED = re.compile(r'#include "([\w/]+)/\w+\.h"')
"""Matches an include of another folder's header; such paths begin below kernels/."""


def sources(operations: Collection[str] | None = None) -> list[Path]:
    """Return the C++ files of operations (None: all), of operations they include, and of this folder, largest first."""
    found = {name_of(file): file for file in KERNELS.rglob("cpu.cpp")}
    names = found.keys() if operations is None else with_included(found, operations)
    files = [*(found[name] for name in names), *(KERNELS / "runtime" / "cpp").glob("*.cpp")]
    return sorted(files, key=lambda file: (-file.stat().st_size, file))


def name_of(file: Path) -> str:
    """Return an operation's name: its folder below kernels/ with dots, such as "mamba2.decode"."""
    return ".".join(file.parent.relative_to(KERNELS).parts)


def with_included(found: Mapping[str, Path], operations: Iterable[str]) -> set[str]:
    """Return the operations and those whose headers they include, transitively.

    The C++ of an included operation defines the functions that its header declares, so it must be linked too.

    found: the cpu.cpp of each operation that has one, by name.
    """
    names, todo = set[str](), {name for name in operations if name in found}
    while todo:
        names |= todo
        files = [file for name in todo for file in found[name].parent.iterdir() if file.suffix in (".cpp", ".h")]
        folders = {name for file in files for name in INCLUDED.findall(file.read_text(encoding="utf-8"))}
        included = {folder.replace("/", ".") for folder in folders}
        todo = (included & found.keys()) - names
    return names


def key(compiler: Compiler, target: Target, operations: Collection[str] | None = None) -> str:
    """Return a name for the library: its target, and a hash of the compiler, the flags and all sources."""
    return _key(target, [*compiler.command, compiler.version, *compiler.flags(target)], operations)


def prebuilt_key(target: Target) -> str:
    """Return a name for a wheel's library: its target, and a hash of the flags and all sources.

    It does not depend on the compiler, because a machine that loads the library may have none.
    """
    return _key(target, [*FLAGS, *target.march], None)


def _key(target: Target, command: Iterable[str], operations: Collection[str] | None) -> str:
    """Return a library's name: its target, and a hash of what it is made with and from."""
    return f"{target.name}-{_hash(command, [*sources(operations), *KERNELS.rglob('*.h')])}"


def _hash(command: Iterable[str], files: Iterable[Path]) -> str:
    """Return a hash of a command, and of the paths and contents of files."""
    digest = hashlib.sha256("\0".join(command).encode())
    for file in sorted(files):
        content = file.read_bytes()
        digest.update(f"\0{file.relative_to(KERNELS)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:KEY]


def build(
    compiler: Compiler,
    target: Target,
    library: Path,
    operations: Collection[str] | None = None,
    extra: tuple[str, ...] = (),
    objects: Path | None = None,
) -> None:
    """Compile the sources in parallel and link them. Raise CompileError if the compiler fails.

    library: where the shared library is written.
    operations: the operations that the library is for; None: all.
    extra: further flags of the compiler.
    objects: a folder for the compiled sources, which only one process uses at a time. A library for other operations,
      or after a change of a source, then compiles only what is new. None: they are not kept.
    """
    flags = [*compiler.flags(target), f"-I{KERNELS}", *extra]
    with TemporaryDirectory() as temporary, ThreadPoolExecutor(os.cpu_count()) as workers:
        folder = Path(temporary) if objects is None else objects
        folder.mkdir(exist_ok=True)
        command, headers = [*compiler.command, compiler.version, *flags], [*KERNELS.rglob("*.h")]
        names = {source: f"{target.name}-{_hash(command, [source, *headers])}" for source in sources()}
        remove_others(folder, target, names.values())

        def compile_one(source: Path) -> str:
            if (found := find(folder, names[source], ".o")) is not None:
                return str(found)
            compiled = folder / f"{names[source]}.new"
            compiler.run([*flags, "-c", str(source), "-o", str(compiled)])
            return str(store(compiled, names[source], ".o"))

        linked = list(workers.map(compile_one, sources(operations)))
        compiler.run([*flags, *compiler.link_flags, *linked, "-o", str(library)])


def remove_others(folder: Path, target: Target, names: Collection[str]) -> None:
    """Remove a target's compiled sources from a folder, unless they have one of the names."""
    for abandoned in folder.glob("*.new"):  # left by a process that was killed
        abandoned.unlink()
    for file in folder.glob("*.o"):
        name = file.name.rpartition("-")[0]
        if name.rpartition("-")[0] == target.name and name not in names:
            file.unlink()


def build_prebuilt(compiler: Compiler, target: Target, folder: Path) -> Path:
    """Compile all operations for a wheel into a library in `folder`, and return its path. May raise CompileError."""
    temporary = folder / f"{target.name}.new"
    build(compiler, target, temporary)
    return store(temporary, prebuilt_key(target))
