"""The loop of a peer's process: reads requests from stdin and writes answers to stdout, one JSON object a line.

Request: {"prompts": [[token, ...], ...], "tokens": number of tokens to generate for each}.
Answer: {"tokens": [[token, ...], ...], "seconds": [[time of each token since the request was read], ...]}.
Before the first request, a line is written that says that the peer is ready.
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
    """The tokens of each row, and the time of each token."""

    rows: int
    began: float = field(default_factory=time.perf_counter)
    tokens: list[list[int]] = field(init=False)  # tokens of each row
    seconds: list[list[float]] = field(init=False)  # for each row: seconds of each token since `began`

    def __post_init__(self) -> None:
        self.tokens, self.seconds = [[] for _ in range(self.rows)], [[] for _ in range(self.rows)]

    def add(self, row: int, tokens: list[int]) -> None:
        self.tokens[row].extend(tokens)
        self.seconds[row].extend([time.perf_counter() - self.began] * len(tokens))


def serve(generate: Callable[[list[list[int]], int], Answer]) -> None:
    """Answer requests until stdin ends.

    Answers are written to a copy of stdout; stdout itself is redirected to stderr, for libraries that print.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def write(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    write({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        answer = generate(request["prompts"], request["tokens"])
        write({"tokens": answer.tokens, "seconds": answer.seconds})
