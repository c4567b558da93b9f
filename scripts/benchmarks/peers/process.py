"""A peer in its own process and environment: it takes prompts, and returns tokens and their times."""

import json
import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from scripts.benchmarks.common.figures import steady_rate

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Generated:
    """The answers to some prompts."""

    tokens: list[list[int]]  # tokens of each answer
    seconds: list[list[float]]  # for each answer: seconds from the request until each token was known


class Peer:
    """A contender in its own process, which ends when the context is left.

    python: interpreter of the peer's environment.
    script: name of a script in this folder, which calls serve_lines.serve.
    threads: value of OMP_NUM_THREADS.
    log: file for stderr.
    """

    def __init__(self, python: str, script: str, arguments: Sequence[str], threads: int, log: Path) -> None:
        self._log = log
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [python, str(HERE / script), *arguments],
                cwd=log.parent,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            )
        assert self._process.stdin and self._process.stdout
        self._requests: IO[bytes] = self._process.stdin
        self._answers: IO[bytes] = self._process.stdout

    def __enter__(self) -> Self:
        """Wait until the peer is ready."""
        self._read()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def generate(self, prompts: list[list[int]], tokens: int) -> Generated:
        """Generate `tokens` tokens for each prompt. Raises RuntimeError if the process has died or returned fewer."""
        with suppress(BrokenPipeError):  # `_read` reports a process that has died
            self._requests.write(json.dumps({"prompts": prompts, "tokens": tokens}).encode() + b"\n")
            self._requests.flush()
        generated = Generated(**self._read())
        if any(len(row) != tokens for row in generated.tokens):
            raise RuntimeError(f"asked for {tokens} tokens, got {[len(row) for row in generated.tokens]}")
        return generated

    def prefill(self, prompt: list[int]) -> float:
        """Return prompt tokens per second; the time ends when the first token of the answer is known."""
        return len(prompt) / self.generate([prompt], 1).seconds[0][0]

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        """Return tokens per second, summed over all rows, while all of them decode."""
        return steady_rate(lambda tokens: self._arrivals(prompts, tokens), steps)

    def _arrivals(self, prompts: list[list[int]], tokens: int) -> list[list[tuple[float, int]]]:
        """Return, for each answer, pairs (seconds since the request, number of tokens so far)."""
        streams = self.generate(prompts, tokens).seconds
        return [[(at, count) for count, at in enumerate(row, 1)] for row in streams]

    def _read(self) -> Any:
        if line := self._answers.readline():
            return json.loads(line)
        self._process.wait()
        tail = self._log.read_text(errors="replace")[-2000:]
        raise RuntimeError(f"the process ended with code {self._process.returncode} (log: {self._log}):\n{tail}")
