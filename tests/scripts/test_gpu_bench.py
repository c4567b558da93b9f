"""scripts/bench gpu without a GPU: its parts at toy sizes, in Triton's interpreter."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.models.config import ModelConfig
from baton.models.loading.checkpoint import find_family
from scripts.benchmarks.common.floors import floor_of
from scripts.benchmarks.gpu.models import MODELS, idle_share
from scripts.benchmarks.gpu.operations.listed import TOYS
from scripts.benchmarks.gpu.records import Records
from scripts.benchmarks.gpu.timing import Ceilings, copies_for

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


def bench(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/bench", "gpu", *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=300)


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.soak
def test_all_parts_run_and_can_be_resumed(tmp_path: Path) -> None:
    out, parts = tmp_path / "records.jsonl", ("kernels", "speed", "models", "idle", "server", "trace")
    done = bench("--toy", *parts, "--out", str(out), TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = lines_of(out)
    names = {part: [line["name"] for line in lines if line["part"] == part] for part in parts}
    assert names["kernels"] == [f"{name}, {dtype}" for name in TOYS for dtype in ("float32",)]
    assert names["speed"] == ["ceilings", *TOYS]
    assert names["models"] == ["ceilings", "toy prefill", "toy decode 1", "toy decode 2"]
    assert names["idle"] == ["toy decode 1", "toy decode 2"]
    assert names["server"] == ["tiny"] and [line["errors"] for line in lines if line["part"] == "server"] == [0]
    assert all(line["gpu"] == "cpu" and line["revision"] for line in lines)
    assert all(line["microseconds"] > 0 for line in lines if line["part"] == "speed" and line["name"] != "ceilings")
    trace = json.loads(gzip.decompress((tmp_path / "trace-toy.json.gz").read_bytes()))
    assert trace["traceEvents"]

    again = bench("--toy", "kernels", "models", "--out", str(out), TRITON_INTERPRET="1")
    assert again.returncode == 0
    assert [line["name"] for line in lines_of(out)[len(lines) :]] == ["ceilings"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_it_says_that_it_needs_a_gpu(tmp_path: Path) -> None:
    done = bench("--out", str(tmp_path / "records.jsonl"))
    assert (done.returncode, done.stdout) == (
        2,
        "scripts/bench gpu needs a GPU, and there is none here; --toy shows that it runs\n",
    )


def test_an_unknown_part_is_rejected() -> None:
    done = bench("kernel")
    assert (done.returncode, done.stdout.partition(";")[0]) == (2, "no part is called kernel")


def test_failures_are_reported_but_not_recorded(tmp_path: Path) -> None:
    """Without a GPU and without the interpreter Triton fails, which is printed but not recorded."""
    out = tmp_path / "records.jsonl"
    done = bench("--toy", "kernels", "--out", str(out))
    assert done.returncode == 1 and "kernels: failed" in done.stdout
    assert not out.exists()


def test_another_gpu_or_revision_is_measured_again(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    Records(file, {"gpu": "A", "revision": "1"}).keep("speed", "x", microseconds=1.0)
    assert Records(file, {"gpu": "A", "revision": "1"}).has("speed", "x")
    for about in ({"gpu": "B", "revision": "1"}, {"gpu": "A", "revision": "2"}):
        assert not Records(file, about).has("speed", "x")
    assert not Records(file, {"gpu": "A", "revision": "1"}).has("models", "x")


def test_idle_time_is_not_covered_by_any_work() -> None:
    def work(begin: float, end: float, cat: str = "kernel") -> dict[str, Any]:
        return {"cat": cat, "ts": begin, "dur": end - begin}

    assert idle_share([work(0, 10), work(30, 40)]) == 0.5
    assert idle_share([work(0, 30), work(10, 20), work(30, 40, "gpu_memcpy"), work(0, 100, "cpu_op")]) == 0
    assert idle_share([work(0, 10, "cpu_op"), {"ph": "M"}]) is None


@pytest.mark.parametrize(("name", "billions"), [("130M", 0.129), ("1B", 1.0), ("9B", 8.9)])
def test_models_have_the_sizes_of_their_names(name: str, billions: float) -> None:
    config = ModelConfig(MODELS[name])
    with torch.device("meta"):
        model = find_family(config).build(config, torch.bfloat16, torch.float32)
    assert isinstance(model, torch.nn.Module)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count / 1e9 == pytest.approx(billions, rel=0.1)
    floor = floor_of(MODELS[name])
    assert count < (floor.projections + floor.head) * 1.1


def test_ceilings_and_copies() -> None:
    ceilings = Ceilings.measured(CPU)
    assert ceilings.bandwidth > 1e8 and ceilings.rate > 1e7
    assert copies_for(10**12, CPU) == copies_for(1, CPU) == 1


def test_kernels_can_be_selected(tmp_path: Path) -> None:
    out = tmp_path / "records.jsonl"
    done = bench("--toy", "kernels", "--only", "^state_pool", "--out", str(out), TRITON_INTERPRET="1")
    assert done.returncode == 0
    assert [line["name"] for line in lines_of(out)] == ["state_pool.copy, float32", "state_pool.move, float32"]
