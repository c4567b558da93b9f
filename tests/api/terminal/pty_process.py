"""A program on a pseudo-terminal, with methods to press keys and wait for output."""

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path(__file__).resolve().parents[3]
CTRL_C, CTRL_D, UP, CTRL_U = "\x03", "\x04", "\x1b[A", "\x15"
PATIENCE_S = 60.0
READING_S = 0.3
OWN_TERMINAL = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
# Run a module with Python's own SIGINT handler: the child of a parent that ignores SIGINT would ignore it too.
RUN = """\
import runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


class PtyProcess:
    """A program on a pseudo-terminal, for use as `with PtyProcess(arguments, environment) as it:`.

    arguments: a module and its arguments. The program is killed at the end of the block if it still runs.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._master, slave = pty.openpty()
        clean = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWN_TERMINAL + RUN, *arguments],
            cwd=ROOT,
            env=clean | {"PYTHONPATH": str(ROOT), "TERM": "xterm"} | environment,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        self.raw = ""
        self._seen = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)

    @property
    def shown(self) -> str:
        """All output so far, without escape sequences."""
        return ESCAPES.sub("", self.raw)

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def interrupt_reading(self) -> None:
        """Press Ctrl-C while the program waits for a key. Between two keys, CPython's readline would notice it late."""
        time.sleep(READING_S)
        self.press(CTRL_C)

    def enter(self, line: str) -> None:
        self.press(line + "\r")

    def expect(self, text: str) -> str:
        """Wait until `text` follows the previously expected text, and return the output between, with `text`."""
        deadline = time.monotonic() + PATIENCE_S
        while (found := self.shown.find(text, self._seen)) < 0:
            assert time.monotonic() < deadline and self._read(deadline), f"no {text!r} in {self.shown!r}"
        since, self._seen = self._seen, found + len(text)
        return self.shown[since : self._seen]

    def wait(self) -> int:
        """Wait until the program ends, and return its exit code."""
        while self._read(time.monotonic() + PATIENCE_S):
            pass
        return self.process.wait(PATIENCE_S)

    def _read(self, deadline: float) -> bool:
        """Read some output. Return False at its end."""
        ready, _, _ = select.select([self._master], [], [], max(deadline - time.monotonic(), 0))
        try:
            data = os.read(self._master, 65536) if ready else b""
        except OSError:  # Linux reports EIO when the last process has closed the terminal.
            return False
        self.raw += data.decode(errors="replace")
        return bool(data)
