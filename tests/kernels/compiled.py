"""The kernels' C++ compiled for a test."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from kernels import native

KERNELS = Path(__file__).parents[2] / "kernels"
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-shared", "-fno-exceptions", "-fno-math-errno", "-fno-trapping-math"]
SANITIZED = ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
TARGETS = {
    "v4-bf16": (["-march=x86-64-v4", "-mavx512bf16"], "avx512_bf16"),
    "v4": (["-march=x86-64-v4"], "avx512f"),
    "v3": (["-march=x86-64-v3"], "avx2"),
    "v2": (["-march=x86-64-v2"], "sse4_2"),
}


def runnable() -> list[str]:
    """Names of TARGETS, the fastest first; what this CPU lacks left out."""
    cpu = Path("/proc/cpuinfo").read_text().split()
    return [name for name, (_, feature) in TARGETS.items() if feature in cpu]


@cache
def library(target: str) -> Path:
    sources = [*KERNELS.glob("*/cpu.cpp"), *KERNELS.glob("native/*.cpp")]
    built = Path(mkdtemp()) / "kernels.so"
    flags = [*FLAGS, "-Wall", "-Wextra", "-Werror", "-ffp-contract=fast", *TARGETS[target][0]]
    flags += SANITIZED if "BATON_SANITIZE" in os.environ else []
    subprocess.run(["g++", *flags, *map(str, sources), "-o", str(built)], check=True)
    return built


@contextmanager
def installed(target: str, threads: int = 1) -> Iterator[None]:
    assert native.install(library(target), threads) == {}
    try:
        yield
    finally:
        native.uninstall()
