"""transformers, in a process of its own: reads prompts (JSON, one a line), and writes the time to their first tokens.

    scripts/benchmarks/transformers_peer.py FOLDER THREADS

Each prompt is read whole, with an empty cache: transformers keeps none between calls. `Transformers` is its client.
"""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self


def is_installed() -> bool:
    return importlib.util.find_spec("transformers") is not None


class Transformers:
    """The process; as a context it ends when it is left."""

    def __init__(self, folder: Path, threads: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(folder), str(threads)],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def first_token(self, prompt: list[int]) -> tuple[float, int]:
        """The seconds until it was known, and the token itself. RuntimeError if the process has died."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(prompt).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"transformers ended with code {self._process.wait()}; its stderr says why")
        seconds, token = json.loads(answer)
        return seconds, token


def main(folder: str, threads: int) -> None:
    """Answers leave through a copy of stdout: whatever else is printed goes to stderr."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    model = load(folder, threads)
    for line in sys.stdin:
        print(json.dumps(first_token(model, json.loads(line))), file=answers, flush=True)


def load(folder: str, threads: int) -> Any:
    # Our package kernels is importable here, and transformers would take it for the PyPI project of that name.
    sys.modules["kernels"] = None  # type: ignore[assignment]
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers.Mamba2ForCausalLM.from_pretrained(folder, dtype="auto").eval()


def first_token(model: Any, prompt: list[int]) -> tuple[float, int]:
    torch: Any = importlib.import_module("torch")
    began = time.perf_counter()
    with torch.inference_mode():
        logits = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1).logits
        token = int(logits[0, -1].argmax())
    return time.perf_counter() - began, token


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
