"""Throughput of streams with and without a grammar in the same batch, and the time to compile a grammar."""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from baton.models.text.grammars.compiling import Grammars
from baton.models.text.grammars.writing import json_schema
from scripts.benchmarks.common.contenders import Workbench
from scripts.benchmarks.common.server import Served, completion_tokens

PROMPT, WARM_UP = 16, 8
TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 100_000}
SCHEMA_CHARACTERS = 10_000


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=16, help="streams that decode together")
    parser.add_argument("--constrained", type=int, default=4, help="how many of them follow a grammar")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each measurement")


def run(options: argparse.Namespace, workbench: Workbench) -> None:
    vocabulary, rounds = workbench.config["vocab_size"], options.rounds or 5
    folder = with_bytes(workbench.checkpoint, vocabulary) if options.model != "bundled" else workbench.checkpoint
    seconds = compile_time(folder, vocabulary, rounds)
    print(f"a schema of {SCHEMA_CHARACTERS:,} characters compiles in {1000 * seconds:.0f} ms")
    for name, flags in {"two steps in flight": [], "one step in flight": ["--no-overlap"]}.items():
        flags = ["--max-running", str(options.rows), "--log-format", "json", *flags]
        with Served(folder, options.threads, flags, workbench.log("grammars")) as served:
            sizes = options.rows, options.constrained
            show(name, asyncio.run(measure(served, vocabulary, *sizes, options.seconds, rounds)))


def with_bytes(folder: Path, vocab_size: int, name: str = "bytes") -> Path:
    """Return a copy of a model's folder whose tokens are bytes and random strings of printable characters."""
    copy = folder.with_name(f"{folder.name}-{name}")
    copy.mkdir(exist_ok=True)
    for file in folder.iterdir():
        if file.name != "tokenizer.json" and not (copy / file.name).exists():
            (copy / file.name).symlink_to(file)
    write_byte_tokenizer(copy / "tokenizer.json", vocab_size)
    return copy


def write_byte_tokenizer(file: Path, vocab_size: int) -> None:
    """Write a byte-level BPE tokenizer with random merges."""
    rng = random.Random(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: at for at, letter in enumerate(alphabet)}
    merges = []
    printable = [letter for letter in alphabet if letter.isascii()]
    while len(vocabulary) < vocab_size:
        left, right = rng.choice(printable), rng.choice(printable)
        if len(left) + len(right) <= 12 and left + right not in vocabulary:
            vocabulary[left + right] = len(vocabulary)
            merges.append((left, right))
            printable.append(left + right)
    tokenizer = Tokenizer(BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(file))


def schema_of(characters: int) -> dict[str, Any]:
    """Return a schema of required properties whose JSON is at least `characters` long."""
    properties: dict[str, Any] = {}
    while len(json.dumps(properties)) < characters:
        kind = ("string", "integer", "boolean")[len(properties) % 3]
        properties[f"property {len(properties)}"] = {"type": kind}
    return {"type": "object", "properties": properties, "required": list(properties)}


def compile_time(folder: Path, vocab_size: int, rounds: int) -> float:
    """Return the median seconds to compile a schema of SCHEMA_CHARACTERS characters and its first mask."""
    grammar, seconds = json_schema(schema_of(SCHEMA_CHARACTERS)), []
    for _ in range(rounds):
        grammars = Grammars((folder / "tokenizer.json").read_text(), vocab_size, vocab_size, [])
        began = time.perf_counter()
        grammars.compile(grammar)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


@dataclass
class Figures:
    """Mean tokens per second of one stream, by round."""

    free: list[float] = field(default_factory=list)  # streams of a batch without grammars
    mixed: list[float] = field(default_factory=list)  # streams without a grammar, in a batch with some grammars
    constrained: list[float] = field(default_factory=list)  # streams with a grammar, in the same batch


class Stream:
    """The number of tokens of an answer; `warm` is set after WARM_UP tokens."""

    def __init__(self) -> None:
        self.tokens = 0
        self.warm = asyncio.Event()

    async def run(self, http: aiohttp.ClientSession, prompt: Sequence[int], grammar: dict[str, Any]) -> None:
        sampling = {"max_new_tokens": 100_000, "temperature": 1.0, "ignore_eos": True, "seed": 1, **grammar}
        body = {"input_ids": list(prompt), "sampling_params": sampling, "stream": True}
        async with http.post("/generate", json=body, raise_for_status=True) as answer:
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    self.tokens = completion_tokens(line)
                    if self.tokens >= WARM_UP:
                        self.warm.set()


async def rates(
    http: aiohttp.ClientSession, vocabulary: int, constrained: Sequence[bool], seconds: float
) -> list[float]:
    """Return the tokens per second of each of some concurrent streams; `constrained` says which have a grammar."""
    rng = random.Random(0)
    grammar = {"json_schema": json.dumps(TEXTS)}
    streams = [Stream() for _ in constrained]
    async with asyncio.TaskGroup() as tasks:
        running = []
        for stream, has_grammar in zip(streams, constrained, strict=True):
            prompt = [rng.randrange(vocabulary) for _ in range(PROMPT)]
            running.append(tasks.create_task(stream.run(http, prompt, grammar if has_grammar else {})))
        for stream in streams:
            await stream.warm.wait()
        began, before = time.perf_counter(), [stream.tokens for stream in streams]
        await asyncio.sleep(seconds)
        passed, after = time.perf_counter() - began, [stream.tokens for stream in streams]
        for task in running:
            task.cancel()
    return [(b - a) / passed for a, b in zip(before, after, strict=True)]


async def measure(served: Served, vocabulary: int, rows: int, some: int, seconds: float, rounds: int) -> Figures:
    """Measure in each round a batch without grammars, and one in which `some` of the `rows` requests have a grammar.

    The first round is dropped.
    """
    figures = Figures()
    mixed = [at < some for at in range(rows)]
    async with aiohttp.ClientSession(served.url) as http:
        for number in range(rounds + 1):
            figures = Figures() if number <= 1 else figures
            figures.free.append(statistics.mean(await rates(http, vocabulary, [False] * rows, seconds)))
            found = await rates(http, vocabulary, mixed, seconds)
            figures.constrained.append(statistics.mean(found[:some]))
            if found[some:]:
                figures.mixed.append(statistics.mean(found[some:]))
    return figures


def show(name: str, figures: Figures) -> None:
    free = statistics.median(figures.free)
    mixed = {"the others": figures.mixed, "those with a grammar": figures.constrained}
    print(f"{name}: {free:.1f} tokens/s a stream without grammars")
    for what, of in mixed.items():
        if not of:
            continue
        shares = [rate / alone for rate, alone in zip(of, figures.free, strict=True)]
        print(f"  {what:<22} {statistics.median(of):7.1f} tokens/s, {100 * statistics.median(shares):5.1f} %")
