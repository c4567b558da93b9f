"""The C++ compiler of this machine: the one that CXX names, else a usual one, else Zig's from PyPI."""

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from baton.kernels.runtime.cpp.targets import Target

NAMES = ("c++", "g++", "clang++")
FLAGS = (
    "-std=c++17",
    "-O2",  # Half of -O3's time; loops that want unrolling or vectors say so.
    "-fPIC",
    "-fno-exceptions",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-Wall",
)
PATIENCE_S = 120.0
PATIENCE_FOR_VERSION_S = 20.0


class CompileError(Exception):
    """The compiler failed or cannot be run; the message holds the first line that says why."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """command: what starts it; version: its first line about itself."""

    command: tuple[str, ...]
    version: str
    is_zig: bool = False

    def flags(self, target: Target) -> tuple[str, ...]:
        return (*FLAGS, f"-mcpu={target.zig}") if self.is_zig else (*FLAGS, *target.march)

    @property
    def link_flags(self) -> tuple[str, ...]:
        """Zig would compile a C and a C++ library first, for a minute; kernels need none but what the process has."""
        return ("-shared", "-nostdlib") if self.is_zig else ("-shared",)

    def run(self, arguments: list[str]) -> None:
        """Raises CompileError if it fails."""
        try:
            done = subprocess.run(
                [*self.command, *arguments], capture_output=True, text=True, errors="replace", timeout=PATIENCE_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CompileError(f"{self.command[0]}: {error}") from error
        if done.returncode:
            said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
            why = next((line for line in said if "error" in line.lower()), said[-1] if said else "")
            raise CompileError(f"{shlex.join(self.command)} ended with {done.returncode}: {why}")


def find_compiler(environment: Mapping[str, str] = os.environ) -> Compiler | None:
    """The first that runs and tells its version; None if there is none."""
    for command in _candidates(environment):
        version = _version(command)
        if version is not None:
            return Compiler(command, version, is_zig="ziglang" in command)
    return None


def _candidates(environment: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    if environment.get("CXX"):
        yield tuple(shlex.split(environment["CXX"]))
    for name in NAMES:
        path = shutil.which(name, path=environment.get("PATH", ""))
        if path is not None:
            yield (path,)
    if importlib.util.find_spec("ziglang") is not None:
        yield (sys.executable, "-m", "ziglang", "c++")


def _version(command: tuple[str, ...]) -> str | None:
    try:
        told = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=PATIENCE_FOR_VERSION_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return told.stdout.strip().partition("\n")[0] if told.returncode == 0 else None
