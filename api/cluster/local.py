"""The launcher of processes on this machine."""

import asyncio
import ctypes
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

from baton.api.cluster.processes import LaunchError, ProcessSpec

LOCAL = "127.0.0.1"
LIBC = ctypes.CDLL(None)
SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
TAIL_BYTES = 1 << 20


class LocalProcess:
    """A child of this process. Its log goes to a file."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, log: Path) -> None:
        self._process, self._url, self._log = process, url, log

    @property
    def url(self) -> str:
        return self._url

    async def wait(self) -> int:
        return await self._process.wait()

    async def stop(self) -> None:
        with suppress(ProcessLookupError):
            self._process.terminate()

    async def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()

    async def log(self, lines: int) -> str:
        return last_lines(self._log, lines)


class LocalLauncher:
    """A launcher of processes on this machine. They get SIGTERM if this process ends."""

    def __init__(self, folder: Path, logs: Path, host: str = LOCAL) -> None:
        """folder: working directory of the processes. logs: folder of their logs. host: their default address."""
        self._folder, self._logs, self._host = folder, logs, host
        self._ports: dict[str, int] = {}  # by name: the port that the process keeps when it is restarted
        self._gpus: dict[str, list[int]] = {}  # by name: the numbers of the process's GPUs
        logs.mkdir(parents=True, exist_ok=True)

    async def start(self, spec: ProcessSpec) -> LocalProcess:
        port = int(spec.options.get("port") or self._ports.get(spec.name) or free_port(self._host))
        host = str(spec.options.get("host", self._host))
        path = self._logs / f"{spec.name}.log"
        try:
            process = await self._run(spec, port, path)
        except OSError as error:  # out of processes or descriptors, or no space for the log
            raise LaunchError(f"{spec.name}: {error}") from None
        self._ports[spec.name] = port
        return LocalProcess(process, f"http://{self._host if host == '0.0.0.0' else host}:{port}", path)

    async def _run(self, spec: ProcessSpec, port: int, log: Path) -> asyncio.subprocess.Process:
        with log.open("ab") as file:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                *spec.arguments(self._host, port),
                cwd=self._folder,
                env=os.environ | self._devices(spec) | dict(spec.variables),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,  # Ctrl-C reaches only the supervisor, which stops the processes in order.
                preexec_fn=end_with_parent,
            )

    async def release(self, name: str) -> None:
        self._gpus.pop(name, None)

    async def close(self) -> None:
        pass

    def _devices(self, spec: ProcessSpec) -> dict[str, str]:
        """Return CUDA_VISIBLE_DEVICES with the process's GPUs: those of its last start, or else the first free ones."""
        if not spec.gpus:
            return {}
        used = {number for name, own in self._gpus.items() if name != spec.name for number in own}
        if spec.name not in self._gpus:
            free = (number for number in range(len(used) + spec.gpus) if number not in used)
            self._gpus[spec.name] = [next(free) for _ in range(spec.gpus)]
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, self._gpus[spec.name]))}


def end_with_parent() -> None:
    """Let the kernel send SIGTERM to this process when its parent ends for any reason."""
    if sys.platform == "linux":
        LIBC.prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def free_port(host: str) -> int:
    """Return a port of `host` that is free now. Raises LaunchError."""
    try:
        with socket.socket() as probe:
            probe.bind((host, 0))
            return int(probe.getsockname()[1])
    except OSError as error:
        raise LaunchError(f"no free port: {error.strerror}") from None


def last_lines(path: Path, lines: int) -> str:
    """Return the last whole lines of a file, of its last MiB at most; none if there is no file."""
    try:
        with path.open("rb") as file:
            if (start := path.stat().st_size - TAIL_BYTES) > 0:
                file.seek(start - 1)
                file.readline()  # the rest of the line that begins before the last MiB
            whole = file.readlines()
    except FileNotFoundError:
        return ""
    return "".join(line.decode(errors="replace") for line in whole[max(0, len(whole) - lines) :])
