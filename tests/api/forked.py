"""Processes forked from one that has imported what a server imports, which takes most of a start's processor time."""

import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

IMPORTED = ["baton.api.cli.commands", "baton.api.serve", "baton.api.wiring", "baton.api.routing.serve"]


class ForkedProcess:
    """`python -m MODULE …` like subprocess.Popen, with stderr as a pipe of text."""

    def __init__(self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        context: Any = get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        read, write = os.pipe()
        # torch reads the number of threads when it is imported.
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = environment["OMP_NUM_THREADS"]
        try:
            self._process = context.Process(target=_Run(arguments, folder, environment, write))
            self._process.start()
        finally:
            os.close(write)
            if before is None:
                del os.environ["OMP_NUM_THREADS"]
            else:
                os.environ["OMP_NUM_THREADS"] = before
        self.pid: int = self._process.pid
        self.stderr = os.fdopen(read, encoding="utf-8")

    @property
    def returncode(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.returncode
        if code is None:
            raise subprocess.TimeoutExpired("a forked server", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Run:
    """The function that a forked process runs: it takes over what a new process would have inherited."""

    def __init__(self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str], stderr: int) -> None:
        self._arguments, self._folder, self._environment = [*arguments], folder, dict(environment)
        self._stderr = stderr
        self._hangup = signal.SIG_IGN if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else signal.SIG_DFL

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_stderr": DupFd(self._stderr)}

    def __call__(self) -> None:
        stderr: Any = self._stderr
        signal.signal(signal.SIGHUP, self._hangup)
        os.dup2(stderr.detach(), 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.chdir(self._folder)
        os.environ.clear()
        os.environ.update(self._environment)
        sys.argv[1:] = self._arguments[1:]
        runpy.run_module(self._arguments[0], run_name="__main__", alter_sys=True)
