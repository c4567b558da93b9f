"""The C++ compiler of this machine: the one in CXX, else a common one on the PATH, else Zig's from PyPI."""

import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from baton.kernels.runtime.cpp.targets import Target

NAMES = ("c++", "g++", "clang++")
FLAGS = (
    "-std=c++17",
    "-O2",  # compiles in half of -O3's time; loops that need unrolling or vectorising have pragmas
    "-fPIC",
    "-fno-exceptions",
    "-fno-threadsafe-statics",  # a library is initialised while it is loaded; Clang would call the C++ runtime
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-Wall",
)
PATIENCE_S = 120.0  # timeout of one compilation
PATIENCE_FOR_VERSION_S = 20.0


class CompileError(Exception):
    """The compiler failed or cannot be run; the message holds the compiler's first line with an error."""


class RunningCompilers:
    """The compilers that run, each with the processes that it starts. They must not outlive this process."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._ended = False  # whether `end_all` was called, so that no compiler may start

    def run(self, command: Sequence[str], timeout: float) -> subprocess.CompletedProcess[str]:
        """Run a command, and capture its output. Raises OSError, or TimeoutExpired after `timeout` seconds."""
        pipe = subprocess.PIPE
        with self._changing:
            if self._ended:
                raise OSError("the process is ending")
            # A compiler starts others. A session of their own makes them one group, which a signal can end.
            process = subprocess.Popen(
                command, stdout=pipe, stderr=pipe, text=True, errors="replace", start_new_session=True
            )
            self._running.add(process)
        with process:
            try:
                output, messages = process.communicate(timeout=timeout)
            except BaseException:
                kill(process)
                raise
            finally:
                with self._changing:
                    self._running.discard(process)
        return subprocess.CompletedProcess(command, process.returncode, output, messages)

    def end_all(self) -> None:
        """Kill all compilers that run, and start no further one."""
        with self._changing:
            self._ended = True
            for process in self._running:
                kill(process)


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a process with all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


RUNNING = RunningCompilers()


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler that runs on this machine."""

    command: tuple[str, ...]  # program and first arguments
    version: str  # first line of what --version prints
    is_zig: bool = False

    def flags(self, target: Target) -> tuple[str, ...]:
        """Return the flags of a compilation for this target."""
        return (*FLAGS, f"-mcpu={target.zig}") if self.is_zig else (*FLAGS, *target.march)

    @property
    def link_flags(self) -> tuple[str, ...]:
        """Return the flags for linking.

        Zig would first compile a C and a C++ standard library, which takes a minute. Kernels need only symbols that the
        process already has, so these libraries are left out.
        """
        return ("-shared", "-nostdlib") if self.is_zig else ("-shared",)

    def run(self, arguments: list[str]) -> None:
        """Run the compiler. Raise CompileError if it fails."""
        try:
            done = RUNNING.run([*self.command, *arguments], PATIENCE_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CompileError(f"{self.command[0]}: {error}") from error
        if done.returncode:
            lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
            why = next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "")
            raise CompileError(f"{shlex.join(self.command)} ended with {done.returncode}: {why}")


def find_compiler(environment: Mapping[str, str] = os.environ) -> Compiler | None:
    """Return the first candidate that runs and reports its version; None if there is none."""
    for command in _candidates(environment):
        version = _version(command)
        if version is not None:
            return Compiler(command, version, is_zig="ziglang" in command)
    return None


def _candidates(environment: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    """Yield the commands of compilers to try, the preferred one first."""
    if environment.get("CXX"):
        yield tuple(shlex.split(environment["CXX"]))
    for name in NAMES:
        path = shutil.which(name, path=environment.get("PATH", ""))
        if path is not None:
            yield (path,)
    if importlib.util.find_spec("ziglang") is not None:
        yield (sys.executable, "-m", "ziglang", "c++")


def _version(command: tuple[str, ...]) -> str | None:
    """Return the first line of the compiler's --version; None if it cannot be run."""
    try:
        done = RUNNING.run([*command, "--version"], PATIENCE_FOR_VERSION_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().partition("\n")[0] if done.returncode == 0 else None
