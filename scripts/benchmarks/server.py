"""A `baton serve` process on a checkpoint of random weights, and its client."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
from safetensors.torch import save_file
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from torch import Tensor, nn

from models.layers.linear import Embedding, Linear

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 300.0


def plain_weights(model: nn.Module) -> dict[str, Tensor]:
    """By name, in a checkpoint's layout, also those that were packed for this CPU."""
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, layer in model.named_modules():
        if isinstance(layer, Linear | Embedding) and layer.packed:
            weights[f"{name}.weight"] = layer.packed.plain()
    return weights


def write_checkpoint(folder: Path, config: dict[str, Any], model: nn.Module) -> None:
    """config.json, model.safetensors and a tokenizer whose words are t0, t1, ..."""
    (folder / "config.json").write_text(json.dumps(config))
    save_file(plain_weights(model), folder / "model.safetensors")
    words = {f"t{id}": id for id in range(config["vocab_size"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


def completion_tokens(line: bytes) -> int:
    """How many tokens of the answer an event brings it to."""
    return int(json.loads(line.removeprefix(b"data: "))["meta_info"]["completion_tokens"])


class Served:
    """The server's process; the same measurements as benchmarks.bare.Bare, over HTTP."""

    def __init__(self, folder: Path, threads: int, options: list[str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = (folder / "server.log").open("wb")
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "api.cli",
                "serve",
                str(folder),
                "--port",
                str(port),
                "--threads",
                str(threads),
                *options,
            ],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def close(self) -> int:
        """Drain the server; its exit code."""
        self._process.terminate()
        code = self._process.wait()
        self._log.close()
        return code

    def wait_until_ready(self) -> None:
        """RuntimeError, with the end of its log, if the server ends or is not ready in time."""
        if not asyncio.run(self._is_ready()):
            tail = Path(self._log.name).read_text(errors="replace")[-2000:]
            raise RuntimeError(f"the server did not become ready:\n{tail}")

    def prefill(self, prompt: list[int]) -> float:
        """Tokens a second until the first token of the answer has arrived."""
        [arrivals] = asyncio.run(self._generate([prompt], 1))
        return len(prompt) / arrivals[-1][0]

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        """Tokens a second, of all prompts together, while all of them are being answered."""
        streams = asyncio.run(self._generate(prompts, steps + 1))
        begin = max(arrivals[0][0] for arrivals in streams)
        end = min(arrivals[-1][0] for arrivals in streams)
        counts = [[count for at, count in arrivals if begin <= at <= end] for arrivals in streams]
        if begin >= end or not all(counts):
            raise RuntimeError(f"the {len(prompts)} answers were never under way all at once: take more steps")
        return sum(within[-1] - within[0] for within in counts) / (end - begin)

    async def _generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[tuple[float, int]]]:
        """Of each answer, when how many of its tokens had arrived, in seconds since all were asked for."""
        async with aiohttp.ClientSession(self.url) as session:
            began = time.perf_counter()
            return await asyncio.gather(*(self._stream(session, prompt, max_tokens, began) for prompt in prompts))

    async def _stream(
        self, session: aiohttp.ClientSession, prompt: list[int], max_tokens: int, began: float
    ) -> list[tuple[float, int]]:
        sampling = {"max_new_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
        async with session.post("/generate", json=body, raise_for_status=True) as answer:
            lines = [
                (time.perf_counter() - began, line) async for line in answer.content if line.startswith(b"data: {")
            ]
        # Parsed when all is over: the client shares the server's cores.
        arrivals = [(at, completion_tokens(line)) for at, line in lines]
        if not arrivals or arrivals[-1][1] != max_tokens:
            raise RuntimeError(f"asked for {max_tokens} tokens, got {arrivals[-1:]}")
        return arrivals

    async def _is_ready(self) -> bool:
        give_up = time.monotonic() + START_TIMEOUT_S
        async with aiohttp.ClientSession(self.url) as session:
            while time.monotonic() < give_up and self._process.poll() is None:
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get("/ready") as answer:
                        if answer.status == 200:
                            return True
                await asyncio.sleep(0.2)
        return False
