"""What the process of a peer does: reads prompts and answers with tokens, JSON, one request a line.

A request: {"prompts": [[token, ...], ...], "tokens": how many to generate for each}.
An answer: {"tokens": [[...], ...], "seconds": [[when each was known, since the request was read], ...]}.
The first line says that it is ready.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Answer:
    """Of each prompt the tokens, and when each was known."""

    rows: int
    began: float = field(default_factory=time.perf_counter)
    tokens: list[list[int]] = field(init=False)
    seconds: list[list[float]] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens, self.seconds = [[] for _ in range(self.rows)], [[] for _ in range(self.rows)]

    def add(self, row: int, tokens: list[int]) -> None:
        self.tokens[row].extend(tokens)
        self.seconds[row].extend([time.perf_counter() - self.began] * len(tokens))


def serve(generate: Callable[[list[list[int]], int], Answer]) -> None:
    """Until stdin ends. Answers leave through a copy of stdout: whatever else is printed goes to stderr."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def write(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    write({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        answer = generate(request["prompts"], request["tokens"])
        write({"tokens": answer.tokens, "seconds": answer.seconds})
