"""scripts/bench at tiny sizes: each command runs, and its figures are consistent."""

import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from scripts.benchmarks.parts import threads as thread_bench
from tests.api.server_process import ServerProcess, is_option

ROOT = Path(__file__).resolve().parents[2]

TINY = ("--model", "tiny", "--rounds", "1", "--threads", "1")


def bench(*arguments: str) -> list[str]:
    """Run a command and return the lines that it prints."""
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
    """Return the printed rows that have three figures, by the row's name."""
    rows = (re.fullmatch(r"(.+?)((?: +[\d.,]+){3})", line) for line in lines)
    return {row[1]: [float(figure.replace(",", "")) for figure in row[2].split()] for row in rows if row}


def ratio(lines: list[str], name: str) -> tuple[float, int]:
    """Return the median ratio of a comparison, and the number of ratios it was taken from."""
    [found] = [match for line in lines if (match := re.match(rf"{re.escape(name)}: (\S+) \(median of (\d+), ", line))]
    return float(found[1]), int(found[2])


@pytest.mark.soak
def test_engine_compares_the_server_with_the_bare_loop_and_transformers(tmp_path: Path) -> None:
    sizes = [*TINY, "--batches", "2", "--prompt", "64", "--repeats", "0"]
    contenders = ["baton", "paged=baton:--page-size 32", "bare", "transformers", "openvino"]
    lines = bench("engine", *sizes, "--contenders", *contenders, "--json", str(tmp_path / "engine.json"))
    record = json.loads((tmp_path / "engine.json").read_text())
    assert [turn["cell"] for turn in record["turns"]] == ["prefill 64", "decode 2"]
    names = ["baton", "paged", "bare", "transformers:auto"]
    for turn in record["turns"]:
        assert list(turn["figures"]) == names and min(turn["figures"].values()) > 0
        assert min(turn["probe"].values()) > 1e8
    decoded = record["turns"][1]["figures"]
    ratio = record["summary"]["decode 2"]["bare"]["baton to it"]["median"]
    assert ratio == decoded["baton"] / decoded["bare"]
    assert lines[0].startswith(("openvino is not installed", "optimum-intel exports no mamba2"))
    [medians] = [line.split() for line in lines if line.startswith("decode 2")][:1]
    assert medians[2:] == [f"{decoded[name]:,.1f}" for name in names]


@pytest.mark.soak
def test_engine_runs_the_bare_loop_of_a_hybrid() -> None:
    sizes = ["--rounds", "1", "--layers", "2", "--threads", "1", "--batches", "1", "--prompt", "64", "--repeats", "0"]
    lines = bench("--model", "granite-151m", *sizes, "--behind", "600", "--contenders", "bare")
    assert [line.split("  ")[0] for line in lines[1:4]] == ["prefill 64", "decode 1", "decode 1 behind 600"]


@pytest.mark.soak
def test_serving_over_a_server_and_in_static_batches(tmp_path: Path) -> None:
    sizes = [*TINY, "--requests", "4", "--prompt", "40", "--answer", "6"]
    talks = ["--streams", "2", "--workload", "turns", "--turns", "3"]
    found = tmp_path / "serving.json"
    bench("serving", *sizes, *talks, "--contenders", "baton", "transformers", "--json", str(found))
    rounds = json.loads(found.read_text())["rounds"]
    assert list(rounds) == ["baton", "transformers:auto"]
    for [figures] in rounds.values():
        assert figures["errors"] == 0 and figures["tokens"] == pytest.approx(6 * figures["requests"])
        assert 0 < figures["first_p50"] <= figures["first_p99"] and 0 < figures["gap_p50"] <= figures["gap_p99"]
    # A conversation has 40, 86 and 132 tokens; the second and the third turn find the previous ones in the cache.
    assert rounds["baton"][0]["hit_rate"] > 0.4 and rounds["transformers:auto"][0]["hit_rate"] == 0


@pytest.mark.soak
def test_serving_at_a_rate_with_shared_prefixes(tmp_path: Path) -> None:
    sizes = [*TINY, "--requests", "6", "--prompt", "8", "--answer", "4"]
    load = ["--rate", "20", "--workload", "shared", "--shared", "256", "--prefixes", "1"]
    bench("serving", *sizes, *load, "--contenders", "baton", "--json", str(tmp_path / "serving.json"))
    [figures] = json.loads((tmp_path / "serving.json").read_text())["rounds"]["baton"]
    assert figures["errors"] == 0 and 0.2 < figures["hit_rate"] < 1


def test_serving_measures_a_server_that_already_runs(tmp_path: Path) -> None:
    load = ["--rounds", "1", "--requests", "2", "--streams", "2", "--prompt", "4", "--answer", "3"]
    with ServerProcess() as server:
        bench("serving", "--url", f"own={server.url}", *load, "--json", str(tmp_path / "serving.json"))
        # Two requests warm up, then two are measured.
        assert sum(entry.get("endpoint") == "POST /v1/completions" for entry in server.log) == 4
    [figures] = json.loads((tmp_path / "serving.json").read_text())["rounds"]["own"]
    assert figures["errors"] == 0 and figures["tokens"] == pytest.approx(3 * figures["requests"])


@pytest.mark.soak
def test_record_writes_a_table_and_json_for_each_command(tmp_path: Path) -> None:
    more = "--rounds 1 --model tiny --batches 1 --seconds 0.2 --threads 1"
    lines = bench("record", str(tmp_path), "--only", "relay-null", "--more", more)
    assert lines[0].startswith("relay-null (") and sorted(file.name for file in tmp_path.iterdir()) == [
        "relay-null.json", "relay-null.txt",
    ]  # fmt: skip
    assert json.loads((tmp_path / "relay-null.json").read_text())["model"] == "tiny"


@pytest.mark.parametrize("model", ["tiny", pytest.param("null", marks=pytest.mark.soak)])
def test_relay(model: str, tmp_path: Path) -> None:
    sizes = [*TINY, "--model", model, "--batches", "1", "4", "--seconds", "0.5"]
    lines = bench("relay", *sizes, "--json", str(tmp_path / "relay.json"))
    steps = json.loads((tmp_path / "relay.json").read_text())["steps"]
    for [step] in steps.values():
        assert 0 < step["device"] <= step["wall"] * 1.2
        assert {"scheduler", "forward", "results"} <= set(step["actors"])
        assert all(seconds >= 0 for seconds in step["actors"].values())
        assert sum(step["actors"].values()) + step["http"] <= step["wall"] * 1.2
    assert [line.split("  ")[0] for line in lines[1:4]] == ["step", "device", "device idle between steps"]


def test_peers_are_listed() -> None:
    assert [line.split()[0] for line in bench("peers")] == ["llama.cpp", "openvino", "transformers", "guidellm"]


@pytest.mark.soak  # it compiles that revision's native code
def test_products_are_compared_with_another_revision() -> None:
    options = ["--rounds", "3", "--shapes", "1", "--kinds", "int4", "--rows", "1", "4"]
    lines = bench("products", *options, "--against", "HEAD")
    compared = [line.split() for line in lines if line.startswith("int4")]
    assert [line[4] for line in compared] == ["1", "4"]
    assert not any("differ" in line for line in lines)


def test_scheduler_is_compared_with_another_revision() -> None:
    lines = bench("scheduler", "--rounds", "2", "--rows", "8", "--steps", "16", "--against", "HEAD")
    rows = table(lines)
    assert list(rows) == ["here", "HEAD"]
    assert all(0 < low <= median <= high for median, low, high in rows.values())
    assert ratio(lines, "HEAD / here")[1] == 2


@pytest.mark.soak
def test_sessions() -> None:
    sizes = ["--layers", "1", "--threads", "1", "--history", "1500", "--turns", "4", "--new", "8"]
    lines = bench("--rounds", "2", "sessions", *sizes)
    rows = table(lines)
    early, late, cold, transformers = rows.values()
    assert list(rows)[:2] == ["turn 2, after 500 tokens", "turn 4, after 1,500 tokens"]
    assert all(0 < low <= median <= high for median, low, high in rows.values())
    # A turn computes 8 tokens, a cold prompt 1,508. Only the fastest runs count, in case the machine is busy.
    assert max(early[1], late[1]) < cold[1] and late[1] < transformers[1]
    assert ratio(lines, "turn 4 / turn 2")[1] == ratio(lines, "transformers / turn 4")[1] == 2
    assert lines[-1] == "the first token is the same as transformers' in 2 of 2"


@pytest.mark.soak
def test_families(tmp_path: Path) -> None:
    sizes = ["--layers", "2", "--threads", "1", "--prompt", "64", "--batches", "2", "--repeats", "0"]
    lines = bench("--rounds", "2", "--weights", str(tmp_path), "families", "--shapes", "granite-151m", *sizes)
    # There are two tables: one for the decoding loop without a server, one for the server.
    compared = [after for line, after in pairwise(lines) if line.startswith("that / mamba2-129m's")]
    assert len(compared) == 2
    assert all(re.fullmatch(r"granite-151m( +[\d.]+ \([\d.]+-[\d.]+\)){2}", line) for line in compared)
    assert lines[-1].startswith("2 rounds; in ")


@pytest.mark.soak
def test_agents() -> None:
    sizes = ["--layers", "1", "--threads", "1", "--turns", "5", "--result", "100"]
    lines = bench("--rounds", "2", "agents", *sizes)
    early, late = table(lines)
    assert early == "step 2" and late.startswith("step 5, a prompt of ")
    assert ratio(lines, "step 5 / step 2")[1] == 2
    # All of the prompt is cached but the last step, which is short compared to the tools and rules.
    [cached] = [float(line.split()[3]) for line in lines if line.startswith("of that prompt")]
    assert cached > 80


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


@pytest.mark.soak
def test_states_in_bfloat16_are_compared_with_float32() -> None:
    lines = bench("states", "--rounds", "1", "--layers", "1", "--threads", "1", "--rows", "1", "--tokens", "120")
    errors = [line.split() for line in lines if re.match(r"bfloat16 |to the nearest ", line)]
    assert [error[-4] for error in errors] == [mark for mark in ("1", "100", "120") for _ in range(2)] * 2
    assert all(0 <= float(mean) <= float(worst) < 0.1 and 0 <= float(same) <= 1 for *_, mean, worst, same in errors)
    speeds = [line.split() for line in lines if line.startswith("decode ")]
    assert [speed[1] for speed in speeds] == ["1", "4", "16", "64"]
    assert all(abs(float(narrow) / float(wide) - float(ratio)) < 0.02 for _, _, wide, narrow, ratio, *_ in speeds)


@pytest.mark.soak
def test_quantized_weights_are_compared_with_bfloat16() -> None:
    sizes = ("--steps", "4", "--rounds", "1", "--layers", "1", "--threads", "1", "--tokens", "80")
    lines = bench("quantize", *sizes, "--parts", "mamba2-129m", "--model", "mamba2-129m")
    errors = {line.split("  ")[0]: line.split()[-4:] for line in lines if line.endswith("%")}
    rounded = [f"{weights}, {activations}" for weights in ("int8", "int4") for activations in ("bfloat16", "float32")]
    # On a CPU without products of bytes, inputs are not rounded to int8.
    assert [name for name in errors if "to int8" not in name] == ["bfloat16", *rounded]
    for mean, p99, most, _ in errors.values():
        assert 0 < float(mean) < float(p99) <= float(most)
    assert float(errors["int8, float32"][0]) < float(errors["int4, float32"][0])
    speeds = [line.split() for line in lines if re.match(r"(prefill|decode) ", line)]
    assert [(row[1], row[2]) for row in speeds] == [
        (count, name) for count in ("2048", "1", "4", "16") for name in ("bfloat16", "int8", "int4")
    ]
    assert all(float(row[3]) > 0 for row in speeds)
    assert [float(row[4]) for row in speeds if row[2] == "bfloat16"] == [1.0] * 4
    assert all(float(row[5]) > 0 for row in speeds if row[0] == "decode")
