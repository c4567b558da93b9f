"""Decoding with and without drafts: an edited file, JSON quoted from a tool's result, prose, and new code.

The model has random weights, whose output would be noise. So its draws are overruled by written answers: the server
computes every token, and the texts decide which drafts are right. With --head, drafts come from a head for multi-token
prediction, whose predictions are overruled too: each is right with the given probability.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from scripts.benchmarks.common.contenders import MEMORY, Workbench
from scripts.benchmarks.common.heads import with_head
from scripts.benchmarks.common.server import ServerProcess, completion_tokens, whole_lines
from scripts.launch import ROOT

VOCABULARY = 16_384  # tokens of the texts' tokenizer, which is trained on this repository
LONGEST = 600  # most tokens of an answer
MODES = ("off", "auto")
ANSWERS = ("edit", "json", "prose", "code")
COUNTED = ("accepted", "rejected")
WARM_UP = 4  # tokens of an answer before its time begins


@dataclass(frozen=True)
class Task:
    """A prompt and the answer to it."""

    name: str
    prompt: list[int]
    answer: list[int]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16], help="requests at once")
    parser.add_argument("--answers", nargs="+", choices=ANSWERS, default=ANSWERS)
    parser.add_argument("--modes", nargs=2, default=MODES, help="--speculation of the two servers; off off: the noise")
    parser.add_argument("--head", type=float, nargs="+", help="how often a head is right; for --model qwen3_5-161m")
    parser.add_argument("--quantize", choices=["none", "int8", "int4"], default="none")


def run(options: argparse.Namespace, workbench: Workbench) -> None:
    if not options.head:
        compare_servers(options, workbench, workbench.checkpoint, options.modes, 0.0)
    for right in options.head or ():
        print(f"a head that is right with probability {right:g}")
        compare_servers(options, workbench, with_head(workbench.checkpoint, workbench.config), ("off", "mtp"), right)


def compare_servers(
    options: argparse.Namespace, workbench: Workbench, checkpoint: Path, modes: Sequence[str], right: float
) -> None:
    """Print the table for servers with these --speculation. right: how likely each prediction of a head is right."""
    tasks = written_tasks()
    scripts = workbench.made / "answers.json"
    scripts.write_text(json.dumps([(task.prompt, task.answer) for task in tasks]))
    command = [sys.executable, "-m", "scripts.benchmarks.requests.overruled", str(scripts), str(right)]
    serve = ["serve", str(checkpoint), "--threads", str(options.threads), "--quantize", options.quantize]
    more = ["--max-running", str(max(options.rows)), *MEMORY, "--log-format", "json", "--speculation"]
    off, drafting = (
        ServerProcess([*command, *serve, *more, mode], options.threads, workbench.log(f"drafts {mode}"), "/ready")
        for mode in modes
    )
    with off, drafting:
        print(f"{'answer':<8} {'rows':>4}   without   with drafts      ratio (least, most)   accepted of drafted")
        for task in [task for task in tasks if task.name in options.answers]:
            for rows in options.rows:
                asyncio.run(compare(task, rows, options.rounds or 5, off.url, drafting.url))


async def compare(task: Task, rows: int, rounds: int, *urls: str) -> None:
    """Measure a task in turns on both servers, and print a line of the table. The first round is dropped."""
    rates: list[list[float]] = [[], []]
    before = await drafts_of(urls[1])
    for _ in range(rounds + 1):
        for of_server, url in zip(rates, urls, strict=True):
            of_server.append(await rate(url, task, rows))
    accepted, rejected = (now - then for now, then in zip(await drafts_of(urls[1]), before, strict=True))
    without, with_drafts = (of_server[1:] for of_server in rates)
    ratios = sorted(drafted / plain for plain, drafted in zip(without, with_drafts, strict=True))
    print(
        f"{task.name:<8} {rows:>4} {statistics.median(without):9.1f} {statistics.median(with_drafts):9.1f} tokens/s"
        f" {statistics.median(ratios):6.2f} ({ratios[0]:.2f}, {ratios[-1]:.2f})   {accepted} of {accepted + rejected}",
        flush=True,
    )


async def rate(url: str, task: Task, rows: int) -> float:
    """Return tokens per second of `rows` requests together. Their prompts are cached, but for the first time."""
    async with aiohttp.ClientSession(url) as http:
        arrivals = await asyncio.gather(*(stream(http, task) for _ in range(rows)))
    begin = max(at for of_row in arrivals for at, tokens in of_row[:WARM_UP])
    ends = [next((at, tokens) for at, tokens in reversed(of_row)) for of_row in arrivals]
    early = [max(tokens for at, tokens in of_row if at <= begin) for of_row in arrivals]
    late = sum(tokens for _, tokens in ends) - sum(early)
    return late / (max(at for at, _ in ends) - begin)


async def stream(http: aiohttp.ClientSession, task: Task) -> list[tuple[float, int]]:
    """Return pairs (time, tokens arrived so far)."""
    sampling = {"max_new_tokens": len(task.answer), "temperature": 0, "ignore_eos": True}
    body = {"input_ids": task.prompt, "sampling_params": sampling, "stream": True}
    async with http.post("/generate", json=body, raise_for_status=True) as answer:
        chunks = [(time.perf_counter(), chunk) async for chunk in answer.content.iter_any()]
    return [(at, completion_tokens(line)) for at, line in whole_lines(chunks) if line.startswith(b"data: {")]


async def drafts_of(url: str) -> tuple[int, int]:
    """Return how many drafts were accepted and rejected so far."""
    async with aiohttp.ClientSession(url) as http, http.get("/metrics") as answer:
        lines = (await answer.text()).splitlines()
    counts = [line for line in lines if "drafts_" in line and not line.startswith("#")]
    accepted, rejected = (sum(float(line.split()[-1]) for line in counts if f"_{kind}_" in line) for kind in COUNTED)
    return int(accepted), int(rejected)


def written_tasks() -> list[Task]:
    """Return the tasks, whose texts are those of this repository, or drawn from a seed."""
    code = (ROOT / "actors/lease.py").read_text()[:5000]
    edited = code.replace("generation", "epoch").replace("Violation", "Breach")
    records = _records(random.Random(0), 40)
    chosen = [{key: each[key] for key in ("name", "city", "balance")} for each in records[::3]]
    prose = (ROOT / "docs/design.md").read_text()
    texts = {
        "edit": (f"Rename generation to epoch and Violation to Breach, and write the whole file:\n{code}", edited),
        "json": (f"{json.dumps(records, indent=1)}\nWhich customers are every third?", json.dumps(chosen, indent=1)),
        "prose": (prose[:6000], prose[6000:10000]),
        "code": ("Write the policy of eviction.\n", (ROOT / "actors/cache/eviction.py").read_text()),
    }
    tokenizer = _tokenizer()
    return [
        Task(name, tokenizer.encode(prompt).ids, tokenizer.encode(answer).ids[:LONGEST])
        for name, (prompt, answer) in texts.items()
    ]


def _records(rng: random.Random, count: int) -> list[dict[str, object]]:
    words = (ROOT / "README.md").read_text().split()
    return [
        {
            "id": f"{rng.getrandbits(48):012x}",
            "name": f"{rng.choice(words)} {rng.choice(words)}",
            "city": rng.choice(words),
            "joined": f"20{rng.randrange(10, 27)}-{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02}",
            "balance": round(rng.uniform(0, 10_000), 2),
        }
        for _ in range(count)
    ]


def _tokenizer() -> Tokenizer:
    """Train a byte-level BPE on this repository's texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    folders = ("actors", "api", "docs", "kernels", "models", "scripts")
    files: list[Path] = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.*"))]
    texts = (file.read_text() for file in files if file.suffix in (".py", ".md", ".h"))
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=VOCABULARY, show_progress=False))
    return tokenizer
