"""Operations' C++ in one shared library."""

import hashlib
import os
import re
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from baton.kernels.native.compiler import Compiler
from baton.kernels.native.targets import Target

KERNELS = Path(__file__).parents[1]
KEY = 16
INCLUDED = re.compile(r'#include "\.\./(\w+)/')


def sources(operations: Collection[str] | None = None) -> list[Path]:
    """Those of the operations with these names, of all by default, and of what they include; the largest first."""
    found = {file.parent.name: file for file in KERNELS.glob("*/cpu.cpp")}
    wanted = found.keys() if operations is None else with_included(found, operations)
    files = [*(found[name] for name in wanted), *(KERNELS / "native").glob("*.cpp")]
    return sorted(files, key=lambda file: (-file.stat().st_size, file))


def with_included(found: Mapping[str, Path], operations: Iterable[str]) -> set[str]:
    """An operation whose header another one includes is compiled with that: what the header declares is there."""
    wanted, todo = set[str](), {name for name in operations if name in found}
    while todo:
        wanted |= todo
        files = [file for name in todo for file in found[name].parent.iterdir() if file.suffix in (".cpp", ".h")]
        included = {name for file in files for name in INCLUDED.findall(file.read_text(encoding="utf-8"))}
        todo = (included & found.keys()) - wanted
    return wanted


def key(compiler: Compiler, target: Target, operations: Collection[str] | None = None) -> str:
    """Names what is built: the target, and a hash of all that it is built from."""
    told = hashlib.sha256("\0".join([*compiler.command, compiler.version, *compiler.flags(target)]).encode())
    for file in sorted([*sources(operations), *KERNELS.glob("*/*.h")]):
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
    """Compile and link; a file each processor at a time. operations: see sources; extra: further flags.

    Raises CompileError.
    """
    flags = [*compiler.flags(target), *extra]
    with TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as workers:

        def compile_one(source: Path) -> str:
            compiled = Path(folder) / f"{source.parent.name}-{source.stem}.o"
            compiler.run([*flags, "-c", str(source), "-o", str(compiled)])
            return str(compiled)

        objects = list(workers.map(compile_one, sources(operations)))
        compiler.run([*flags, *compiler.link_flags, *objects, "-o", str(library)])
