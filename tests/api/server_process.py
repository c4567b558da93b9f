"""A real server process on a free port, with its log. It is started, awaited, and stopped with SIGTERM."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from tests.api.forked import ForkedProcess

ROOT = Path(__file__).resolve().parents[2]
SERVE = ("baton.api.cli", "serve", "--port", "0", "--log-format", "json")


def is_option(variable: str) -> bool:
    """Return whether a variable sets an option.

    BATON_CACHE does not, because all servers of a test run share its folder; nor BATON_TARGET.
    """
    return variable.startswith("BATON_") and variable not in ("BATON_CACHE", "BATON_TARGET")


class ServerProcess:
    """A server process: `with ServerProcess(...) as server:` waits for /ready, and expects a clean exit after SIGTERM.

    arguments: a module and its arguments. The module must choose a free port and log as JSON.
    key: API key of the requests.
    variables: environment variables that replace those of this process. The server then imports everything by itself.
    folder: working folder of the process.
    is_forked: whether the server may be forked from a process that has imported what it needs.
    """

    def __init__(
        self,
        arguments: Sequence[str] = SERVE,
        wait_ready: bool = True,
        exit_code: int = 0,
        patience_s: float = 120.0,
        key: str = "",
        variables: Mapping[str, str] | None = None,
        folder: Path = ROOT,
        is_forked: bool = sys.platform == "linux",
    ) -> None:
        self.log: list[dict[str, Any]] = []
        self.output: list[str] = []
        self._exit_code = exit_code
        self._wait_ready = wait_ready
        self._patience = patience_s
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        environment = {name: value for name, value in environment.items() if not is_option(name)}
        self.process: subprocess.Popen[str] | ForkedProcess
        if is_forked and variables is None:
            self.process = ForkedProcess(arguments, folder, environment)
        else:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                cwd=folder,
                env=environment | dict(variables or {}),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = ""

    def kill_now(self) -> None:
        """Send SIGKILL, which is the end that the context then expects."""
        self._exit_code = -signal.SIGKILL
        self.process.kill()

    def __enter__(self) -> Self:
        try:
            self.url = self.wait_for("listening")["url"]
            if self._wait_ready:
                self.wait_until(lambda: self.status("/ready") == 200)
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                assert self.stop() == self._exit_code, "".join(self.output[-50:])
        finally:
            self.kill()

    def stop(self) -> int:
        """Send SIGTERM and return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        code = self.process.wait(self._patience)
        self._reader.join(self._patience)
        return code

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def wait_for(self, event: str) -> dict[str, Any]:
        """Wait for the first log line with this event."""
        self.wait_until(lambda: any(line["event"] == event for line in self.log))
        return next(line for line in self.log if line["event"] == event)

    def wait_until(self, condition: Any) -> None:
        deadline = time.monotonic() + self._patience
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self._reader.join(1)
                raise AssertionError(f"exit code {self.process.returncode}:\n{''.join(self.output[-50:])}")
            time.sleep(0.02)

    def status(self, path: str) -> int:
        """Return the status of a GET, or 0 if the server does not answer."""
        try:
            with urlopen(self.url + path, timeout=10) as response:
                return int(response.status)
        except HTTPError as error:
            with error:
                return error.code
        except (URLError, ConnectionError):
            return 0

    def get(self, path: str, url: str = "") -> Any:
        """Return the answer to a GET. url: of another server."""
        with urlopen(Request((url or self.url) + path, headers=self._headers), timeout=60) as response:
            return json.load(response)

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        headers = self._headers | {"Content-Type": "application/json"}
        request = Request(self.url + path, json.dumps(body).encode(), headers)
        try:
            with urlopen(request, timeout=600) as response:
                return response.status, json.load(response)
        except HTTPError as error:
            with error:
                return error.code, json.load(error)

    def resident_mib(self) -> float:
        """Return the resident memory of the process."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def cpu_s(self) -> float:
        """Return the CPU time that the process has used, in seconds."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def descriptors(self) -> int:
        """Return the number of open file descriptors."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.output.append(line)
            try:
                self.log.append(json.loads(line))
            except ValueError:
                continue
