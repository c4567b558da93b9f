"""A peer in a process of its own, in its own environment: prompts go in, tokens and their times come out."""

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from scripts.benchmarks.common.figures import steady_rate

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Generated:
    """Of each prompt the tokens, and the seconds after which each was known."""

    tokens: list[list[int]]
    seconds: list[list[float]]


class Peer:
    """As a context it ends when it is left. `script` is one of this folder's, run by `python`."""

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
        """Waits until it is ready."""
        self._read()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def generate(self, prompts: list[list[int]], tokens: int) -> Generated:
        """RuntimeError, with the end of its log, if the process has died or made fewer tokens."""
        self._requests.write(json.dumps({"prompts": prompts, "tokens": tokens}).encode() + b"\n")
        self._requests.flush()
        generated = Generated(**self._read())
        if any(len(row) != tokens for row in generated.tokens):
            raise RuntimeError(f"asked for {tokens} tokens, got {[len(row) for row in generated.tokens]}")
        return generated

    def prefill(self, prompt: list[int]) -> float:
        """Tokens a second until the first token of the answer is known."""
        return len(prompt) / self.generate([prompt], 1).seconds[0][0]

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        """Tokens a second, of all prompts together, while all of them are being answered."""
        return steady_rate(lambda tokens: self._counted(prompts, tokens), steps)

    def _counted(self, prompts: list[list[int]], tokens: int) -> list[list[tuple[float, int]]]:
        """Of each answer, when it had how many tokens."""
        streams = self.generate(prompts, tokens).seconds
        return [[(at, count) for count, at in enumerate(row, 1)] for row in streams]

    def _read(self) -> Any:
        if line := self._answers.readline():
            return json.loads(line)
        self._process.wait()
        tail = self._log.read_text(errors="replace")[-2000:]
        raise RuntimeError(f"{self._process.args[1:]} ended with code {self._process.returncode}:\n{tail}")  # type: ignore[index]
