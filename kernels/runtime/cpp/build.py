"""Compiling the C++ of operations into one shared library."""

import hashlib
import os
import re
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from baton.kernels.runtime.cpp.compiler import Compiler
from baton.kernels.runtime.cpp.targets import Target

KERNELS = Path(__file__).parents[2]
KEY = 16
INCLUDED = re.compile(r'#include "([\w/]+)/\w+\.h"')
"""The folder of an included header. Includes of other folders are written from kernels/ on."""


def sources(operations: Collection[str] | None = None) -> list[Path]:
    """Return the C++ files of operations (None: all), of what they include, and of this folder; the largest first."""
    found = {name_of(file): file for file in KERNELS.rglob("cpu.cpp")}
    wanted = found.keys() if operations is None else with_included(found, operations)
    files = [*(found[name] for name in wanted), *(KERNELS / "runtime" / "cpp").glob("*.cpp")]
    return sorted(files, key=lambda file: (-file.stat().st_size, file))


def name_of(file: Path) -> str:
    """Return an operation's name: its folder below kernels/ with dots, such as "mamba2.decode"."""
    return ".".join(file.parent.relative_to(KERNELS).parts)


def with_included(found: Mapping[str, Path], operations: Iterable[str]) -> set[str]:
    """Return the operations and those whose headers they include, whose C++ holds what the headers declare."""
    wanted, todo = set[str](), {name for name in operations if name in found}
    while todo:
        wanted |= todo
        files = [file for name in todo for file in found[name].parent.iterdir() if file.suffix in (".cpp", ".h")]
        folders = {name for file in files for name in INCLUDED.findall(file.read_text(encoding="utf-8"))}
        included = {folder.replace("/", ".") for folder in folders}
        todo = (included & found.keys()) - wanted
    return wanted


def key(compiler: Compiler, target: Target, operations: Collection[str] | None = None) -> str:
    """Return a name for the library: its target, and a hash of the compiler, the flags and all sources."""
    told = hashlib.sha256("\0".join([*compiler.command, compiler.version, *compiler.flags(target)]).encode())
    for file in sorted([*sources(operations), *KERNELS.rglob("*.h")]):
        content = file.read_bytes()
        told.update(f"\0{file.relative_to(KERNELS)}\0{len(content)}\0".encode() + content)
    return f"{target.name}-{told.hexdigest()[:KEY]}"


def build(
    compiler: Compiler,
    target: Target,
    library: Path,
    operations: Collection[str] | None = None,
    extra: tuple[str, ...] = (),
) -> None:
    """Compile the sources in parallel and link them. Raise CompileError if the compiler fails.

    library: where the shared library is written.
    operations: which operations it is for, as in `sources`.
    extra: further flags of the compiler.
    """
    flags = [*compiler.flags(target), f"-I{KERNELS}", *extra]
    with TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as workers:

        def compile_one(source: Path) -> str:
            compiled = Path(folder) / f"{name_of(source)}-{source.stem}.o"
            compiler.run([*flags, "-c", str(source), "-o", str(compiled)])
            return str(compiled)

        objects = list(workers.map(compile_one, sources(operations)))
        compiler.run([*flags, *compiler.link_flags, *objects, "-o", str(library)])
