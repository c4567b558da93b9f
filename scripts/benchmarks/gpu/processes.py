"""The parts `suite` and `server`, which run other programs: the tests that need a GPU, and the server under load."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence

from scripts.benchmarks.gpu.bench import Bench
from scripts.launch import ROOT

SUITE = ("tests/cuda", "tests/actors/forward/test_streams.py")
LIMIT_S = 570
TOY = ("--requests", "4", "--streams", "2", "--prompt", "8", "--answer", "8")


def suite(bench: Bench) -> None:
    """Run the tests that need a GPU, each folder in its own process, and record how many passed."""
    for tests in SUITE:
        if bench.records.has("suite", tests):
            continue
        # Warnings are not errors here: packages that the machine has may warn for reasons outside of this project.
        options = ("-p", "no:cacheprovider", "-m", "not soak", "-W", "default")
        done = run([sys.executable, "-m", "pytest", *options, tests])
        counts = {what: int(count) for count, what in re.findall(r"(\d+) (passed|failed|skipped)", done.stdout)}
        if done.returncode or counts.get("skipped") or not counts.get("passed"):
            bench.failed("suite", tests, f"{counts}\n{done.stdout[-4000:]}{done.stderr[-1000:]}")
        else:
            bench.records.keep("suite", tests, **counts)


def server(bench: Bench) -> None:
    """Run scripts/bench serving with the server on this device, and record its figures."""
    model = "tiny" if bench.is_toy else "mamba2-129m"
    if bench.records.has("server", model):
        return
    file, sizes = bench.folder / "serving.json", TOY if bench.is_toy else ()
    command = [
        sys.executable,
        "scripts/bench",
        "serving",
        "--contenders",
        "baton",
        "--model",
        model,
        "--json",
        str(file),
    ]
    done = run([*command, "--server-options", f"--device {bench.device.type}", "--rounds", "1", *sizes])
    if done.returncode:
        bench.failed("server", model, (done.stdout + done.stderr)[-1000:])
    else:
        bench.records.keep("server", model, **json.loads(file.read_text())["rounds"]["baton"][-1])
        file.unlink()


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command for at most LIMIT_S seconds; then it is killed, and its exit code is 124."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired as error:
        return subprocess.CompletedProcess(command, 124, f"not done after {error.timeout} s", "")
