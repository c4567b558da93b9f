"""scripts/bench at toy size: that it measures, and measures what it says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts.benchmarks import threads as thread_bench
from tests.api.server_process import is_option

ROOT = Path(__file__).resolve().parents[2]


def bench(*arguments: str) -> list[str]:
    """The lines that it prints."""
    done = subprocess.run(
        [sys.executable, "scripts/bench", *arguments],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not is_option(name)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def table(lines: list[str]) -> dict[str, list[float]]:
    """The rows of three figures, by name."""
    rows = (re.fullmatch(r"(.+?)((?: +[\d.,]+){3})", line) for line in lines)
    return {row[1]: [float(figure.replace(",", "")) for figure in row[2].split()] for row in rows if row}


def ratio(lines: list[str], name: str) -> tuple[float, int]:
    """The median of a comparison, and of how many."""
    [found] = [match for line in lines if (match := re.match(rf"{re.escape(name)}: (\S+) \(median of (\d+), ", line))]
    return float(found[1]), int(found[2])


def test_the_server_beside_the_bare_loop() -> None:
    lines = bench("--rounds", "1", "--layers", "1", "--threads", "1", "--steps", "64")
    rows = table(lines)
    assert list(rows) == ["prefill 2048", "decode 1", "decode 4", "decode 16"]
    for bare, server, shown in rows.values():
        assert min(bare, server) > 0 and abs(server / bare - shown) < 0.01
    assert lines[-1].startswith("memory bandwidth ")


def test_the_scheduler_beside_that_of_another_revision() -> None:
    lines = bench("scheduler", "--rounds", "2", "--rows", "8", "--steps", "16", "--against", "HEAD")
    rows = table(lines)
    assert list(rows) == ["here", "HEAD"]
    assert all(0 < low <= median <= high for median, low, high in rows.values())
    assert ratio(lines, "HEAD / here")[1] == 2


def test_sessions() -> None:
    sizes = ["--layers", "1", "--threads", "1", "--history", "4000", "--turns", "4", "--new", "8"]
    lines = bench("--rounds", "2", "sessions", *sizes)
    rows = table(lines)
    early, late, cold, transformers = rows.values()
    assert list(rows)[:2] == ["turn 2, behind 1,333 tokens", "turn 4, behind 4,000 tokens"]
    assert all(0 < low <= median <= high for median, low, high in rows.values())
    # A turn of 8 tokens against one of 4,008: the fastest of each, so that a busy machine changes nothing.
    assert max(early[1], late[1]) < cold[1] and late[1] < transformers[1]
    assert ratio(lines, "turn 4 / turn 2")[1] == ratio(lines, "transformers / turn 4")[1] == 2
    assert lines[-1] == "the first token is the same as transformers' in 2 of 2"


def test_threads(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "model_type": "mamba2", "head_dim": 64, "state_size": 16, "n_groups": 1, "expand": 2, "conv_kernel": 4,
        "chunk_size": 64, "tie_word_embeddings": True,
    }  # fmt: skip
    monkeypatch.setattr(thread_bench, "SHAPES", ((64, 1, 256), (128, 2, 512)))
    try:
        thread_bench.measure(config, threads=2, rounds=3)
    finally:
        torch.set_num_threads(1)
    rows = [re.findall(r"[\d.]+", line) for line in capsys.readouterr().out.splitlines()[1:]]
    assert [float(row[0]) for row in rows] == [0.0, 0.3]
    for _, one, many, middle, low, high in rows:
        assert float(one) > 0 and float(many) > 0 and float(low) <= float(middle) <= float(high)
