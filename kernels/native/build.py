"""All kernels' C++ in one shared library."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from kernels.native.compiler import Compiler
from kernels.native.targets import Target

KERNELS = Path(__file__).parents[1]
KEY = 16


def sources() -> list[Path]:
    return sorted([*KERNELS.glob("*/cpu.cpp"), *(KERNELS / "native").glob("*.cpp")])


def key(compiler: Compiler, target: Target) -> str:
    """Names what is built: the target, and a hash of all that it is built from."""
    told = hashlib.sha256("\0".join([*compiler.command, compiler.version, *compiler.flags(target)]).encode())
    for file in sorted([*sources(), *KERNELS.glob("*/*.h")]):
        content = file.read_bytes()
        told.update(f"\0{file.relative_to(KERNELS)}\0{len(content)}\0".encode() + content)
    return f"{target.name}-{told.hexdigest()[:KEY]}"


def build(compiler: Compiler, target: Target, library: Path, extra: tuple[str, ...] = ()) -> None:
    """Compile and link; a file each processor at a time. extra: further flags. Raises CompileError."""
    flags = [*compiler.flags(target), *extra]
    with TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as workers:

        def compile_one(source: Path) -> str:
            compiled = Path(folder) / f"{source.parent.name}-{source.stem}.o"
            compiler.run([*flags, "-c", str(source), "-o", str(compiled)])
            return str(compiled)

        largest_first = sorted(sources(), key=lambda source: source.stat().st_size, reverse=True)
        objects = list(workers.map(compile_one, largest_first))
        compiler.run([*flags, *compiler.link_flags, *objects, "-o", str(library)])
