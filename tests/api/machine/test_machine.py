"""Native code in a server: prepared at the start, reported in the log, and giving the same tokens as torch."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.api.config import Config
from baton.api.machine.device import can_capture
from baton.api.machine.doctor import doctor
from baton.api.machine.environment import expand_segments
from baton.api.machine.threads import SPINS, default_threads, spin_briefly
from baton.api.wiring import bundled_model, load
from baton.kernels.runtime.triton import computes_for
from baton.models.loading.checkpoint import load_model
from tests.api.hash_traffic import make_checkpoint
from tests.api.server_process import ROOT, SERVE, ServerProcess
from tests.kernels.installed import copying_compiler

MEMORY = ("--memory", "64M")
QUESTION = {"messages": [{"role": "user", "content": "What is 12 plus 7?"}], "temperature": 0, "max_tokens": 40}


def answer_of(server: ServerProcess) -> Any:
    status, answer = server.post("/v1/chat/completions", QUESTION)
    assert status == 200
    return answer["choices"][0]["message"]["content"]


def events(server: ServerProcess) -> list[str]:
    return [line["event"] for line in server.log]


def test_a_first_start_compiles_before_it_is_ready_and_the_next_does_not(tmp_path: Path) -> None:
    cache = {"BATON_CACHE": str(tmp_path / "cache"), "CXX": str(copying_compiler(tmp_path))}
    with ServerProcess([*SERVE, *MEMORY, "--dtype", "float32"], variables=cache) as first:
        native = answer_of(first)
        assert "19" in native
        ready = first.wait_for("native code")
    assert (ready["compiled"], ready["functions"] > 0, ready["level"]) == (True, True, "info")
    order = [event for event in events(first) if event in ("compiling native code", "native code", "ready")]
    assert order == ["compiling native code", "native code", "ready"]
    with ServerProcess([*SERVE, *MEMORY], variables=cache) as second:
        assert second.wait_for("native code")["compiled"] is False
    with ServerProcess([*SERVE, *MEMORY, "--dtype", "float32", "--kernels", "torch"], variables=cache) as reference:
        assert answer_of(reference) == native
        assert "native code" not in events(reference)


def test_without_a_compiler_torch_serves_and_the_log_says_what_it_costs(tmp_path: Path) -> None:
    nowhere = {"PATH": str(tmp_path), "CXX": "", "BATON_CACHE": str(tmp_path / "cache")}
    with ServerProcess([*SERVE, *MEMORY], variables=nowhere) as server:
        line = server.wait_for("no native code")
        assert "19" in answer_of(server)
    assert line["level"] == "warning"
    assert "C++ compiler" in line["why"] and "ziglang" in line["why"] and "half the speed" in line["cost"]


def test_threads_are_the_users_or_fit_the_model(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    load(Config(model=str(tmp_path), threads=3, kernels="torch"), lambda done, total: None)
    assert torch.get_num_threads() == 3
    load(Config(model=str(tmp_path), kernels="torch"), lambda done, total: None)
    assert torch.get_num_threads() == 1
    assert default_threads(1_450_000, available=8) == 1
    assert default_threads(129_000_000, available=8) == 8


def test_a_short_spin_unless_the_user_says_how_to_wait() -> None:
    for variables in ({}, {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "passive"}):
        environment = dict(variables)
        spin_briefly(environment)
        assert environment == (variables or {"GOMP_SPINCOUNT": SPINS})


def test_segments_of_gpu_memory_grow_unless_the_user_says_how_to_allocate() -> None:
    for variables in ({}, {"PYTORCH_ALLOC_CONF": "x"}, {"PYTORCH_CUDA_ALLOC_CONF": "x"}):
        environment = dict(variables)
        expand_segments(environment)
        assert environment == (variables or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})


def test_the_command_line_is_read_before_torch_is_imported() -> None:
    """Torch's OpenMP reads its spin count when torch is imported, so the count must be set before."""
    code = "import sys, baton.api.cli, baton.api.machine.environment; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_the_doctor_reports_what_runs() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "baton.api.cli", "doctor", "--json"],
        cwd=ROOT,
        capture_output=True,
        timeout=120,
        check=True,
    )
    found = json.loads(run.stdout)
    assert found["kernel norm.rms"] == "baton_add_rms_norm: native"
    assert found["kernel runtime.cpu_graph"] == "baton_add_scaled: native, baton_replay: native"
    assert "baton_draw: native" in found["kernel sampling"] and found["kernel conv1d"] == "torch"
    assert "ready in" in found["native code"] and "GB/s" in found["memory"]
    assert f"GOMP_SPINCOUNT={SPINS}" in found["threads"]
    assert found["cache"] == os.environ["BATON_CACHE"]
    assert found["gpu"] and found["triton"]


def test_the_doctor_reports_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert doctor(as_json=False) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line[0] != "k")
    assert lines["compiler"] == "none"
    assert lines["native"].startswith("code") and "no C++ compiler" in lines["native"]


def test_decoding_steps_are_captured_unless_they_read_from_the_device(tmp_path: Path) -> None:
    device = torch.device("meta")
    hashes, bundled = (
        load_model(path, None, torch.device("cpu")) for path in (make_checkpoint(tmp_path), bundled_model())
    )
    assert not can_capture(bundled, device)
    with computes_for("meta"):
        assert can_capture(bundled, device) and not can_capture(hashes, device)
