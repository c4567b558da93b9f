"""Server processes: any server, and `baton serve` with a client that measures it."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Self

import aiohttp

from scripts.benchmarks.common.figures import steady_rate
from scripts.launch import ROOT

START_TIMEOUT_S = 300.0


def completion_tokens(line: bytes) -> int:
    """Return how many tokens the answer has so far, from a line of the event stream of /generate."""
    return int(json.loads(line.removeprefix(b"data: "))["meta_info"]["completion_tokens"])


def whole_lines(chunks: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """Yield each line of a stream with the time at which the end of the line arrived."""
    rest = b""
    for at, chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from ((at, line) for line in lines)


class ServerProcess:
    """A server process. Entering it as a context waits until the server is ready; leaving terminates the server.

    command: starts the server; `--port` with a free port is appended.
    threads: value of OMP_NUM_THREADS.
    log: file for stdout and stderr.
    ready: path that answers 200 once the server can be used.
    """

    def __init__(self, command: Sequence[str], threads: int, log: Path, ready: str) -> None:
        self._ready = ready
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = log.open("wb")
        self._process = subprocess.Popen(
            [*command, "--port", str(port)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def __enter__(self) -> Self:
        try:
            self.wait_until_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def process(self) -> int:
        """Process id."""
        return self._process.pid

    def close(self) -> int:
        """Terminate the server, which drains first, and return its exit code."""
        self._process.terminate()
        code = self._process.wait()
        self._log.close()
        return code

    def wait_until_ready(self) -> None:
        """Wait until the server is ready. Raises RuntimeError with the end of the log if it ends or is too slow."""
        if not asyncio.run(self._is_ready()):
            tail = Path(self._log.name).read_text(errors="replace")[-2000:]
            raise RuntimeError(f"the server did not become ready:\n{tail}")

    async def _is_ready(self) -> bool:
        deadline = time.monotonic() + START_TIMEOUT_S
        async with aiohttp.ClientSession(self.url) as session:
            while time.monotonic() < deadline and self._process.poll() is None:
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(self._ready) as answer:
                        if answer.status == 200:
                            return True
                await asyncio.sleep(0.2)
        return False


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Served(ServerProcess):
    """Baton's server as a contender: the same measurements as common.bare.Bare, over HTTP."""

    def __init__(self, folder: Path, threads: int, options: Sequence[str], log: Path) -> None:
        command = [sys.executable, "-m", "baton.api.cli", "serve", str(folder), "--threads", str(threads)]
        super().__init__([*command, *options], threads, log, "/ready")

    def __exit__(self, *_: object) -> None:
        """Terminate the server. Raises RuntimeError if its exit code is not 0."""
        if code := self.close():
            raise RuntimeError(f"the server ended with code {code}; {self._log.name} says why")

    def prefill(self, prompt: list[int]) -> float:
        """Return prompt tokens per second; the time ends when the first token of the answer arrives."""
        [arrivals] = asyncio.run(self._generate([prompt], 1))
        return len(prompt) / arrivals[-1][0]

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        """Return tokens per second, summed over all rows, while all of them decode."""
        return steady_rate(lambda tokens: asyncio.run(self._generate(prompts, tokens)), steps)

    async def _generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[tuple[float, int]]]:
        """Request all prompts at once. Return, for each answer, pairs (seconds since then, tokens arrived so far)."""
        async with aiohttp.ClientSession(self.url) as session:
            began = time.perf_counter()
            return await asyncio.gather(*(self._stream(session, prompt, max_tokens, began) for prompt in prompts))

    async def _stream(
        self, session: aiohttp.ClientSession, prompt: list[int], max_tokens: int, began: float
    ) -> list[tuple[float, int]]:
        sampling = {"max_new_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
        async with session.post("/generate", json=body, raise_for_status=True) as answer:
            chunks = [(time.perf_counter() - began, chunk) async for chunk in answer.content.iter_any()]
        # Parse after the stream has ended: the client shares the server's cores, and would slow the server down.
        arrivals = [(at, completion_tokens(line)) for at, line in whole_lines(chunks) if line.startswith(b"data: {")]
        if not arrivals or arrivals[-1][1] != max_tokens:
            raise RuntimeError(f"asked for {max_tokens} tokens, got {arrivals[-1:]}")
        return arrivals
