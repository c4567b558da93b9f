"""The parts of scripts/tune that need no GPU: candidates, the choice, and the table."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tests.kernels.gpu.interpreter  # noqa: F401
from baton.kernels.runtime.triton import KernelConfig, config_of
from baton.kernels.runtime.triton.configs import table_of
from scripts.benchmarks.gpu.operation import Draw, Operation
from scripts.benchmarks.gpu.operations.listed import TOYS
from scripts.benchmarks.gpu.tuning import Table, choices, fastest

ROOT = Path(__file__).resolve().parents[2]
CPU, META = torch.device("cpu"), torch.device("meta")
KEY = ("add.one", "of=4")
CONFIGS = tuple(KernelConfig({"BLOCK": block}) for block in (16, 32, 64, 128))
RIGHT, FAST, WRONG, BROKEN = CONFIGS


def adding() -> Operation:
    """Return an operation that changes its input, so that a second run with the same input is wrong."""

    def run(x: Tensor) -> list[Tensor]:
        config = config_of(*KEY, x.device, *CONFIGS)
        if config is BROKEN:
            raise RuntimeError("out of resources")
        x += 1.5 if config is WRONG else 1
        last.append(config)
        return [x]

    return Operation(run, run, (torch.ones(4),), 16)


last = list[KernelConfig]()


def test_the_fastest_right_configuration_is_chosen() -> None:
    cost = {16: 1.0, 32: 0.5, 64: 0.1}
    assert fastest(KEY, CONFIGS, [adding], lambda _: cost[last[-1].blocks["BLOCK"]]) == (FAST, 0.5)


def test_the_default_stays_if_the_gain_is_noise() -> None:
    cost = {16: 1.0, 32: 0.99}
    assert fastest(KEY, CONFIGS, [adding], lambda _: cost[last[-1].blocks["BLOCK"]]) == (RIGHT, 1.0)


def test_all_operations_have_the_same_weight() -> None:
    """Ten times the speed in a short operation outweighs one second less in a long one. The default is timed twice."""
    times = iter([2.0, 0.1, 1.0, 100.0, 101.0, 200.0])
    best, gain = fastest(KEY, CONFIGS[:2], [adding, adding], lambda _: next(times))
    assert best is FAST and gain == pytest.approx((0.1 * 1.01) ** 0.5)


def test_a_failing_default_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"the default of \('add.one', 'of=4'\) does not run"):
        fastest(KEY, (BROKEN, RIGHT), [adding], lambda _: 1.0)


def test_every_configurable_kernel_has_candidates() -> None:
    """Every configurable kernel has candidates, and is timed in the operation with the fewest other kernels."""
    found = choices({name: lambda build=build: build(Draw(META)) for name, build in TOYS.items()})
    kernels = {kernel for kernel, _ in found}
    assert {
        "mamba2.ssd.scan",
        "attention.paged.decode",
        "mamba2.state_update.step",
        "sampling.split",
        "norm.rms.add_rms_norm",
    } <= kernels
    assert {kernel for (kernel, _), (candidates, _) in found.items() if len(candidates) < 2} == set()
    users = {name for (kernel, _), (_, users) in found.items() if kernel == "mamba2.ssd.scan" for name in users}
    assert users == {"ssd"}


def test_a_table_can_be_resumed_and_is_read_by_the_kernels(tmp_path: Path) -> None:
    file = tmp_path / "configs.json"
    file.write_text("{}")
    table = Table(file, "NVIDIA H200")
    assert not table.has(KEY)
    table.keep(KEY, KernelConfig({"BLOCK": 32}, 8, 3))
    assert Table(file, "NVIDIA H200").has(KEY) and not Table(file, "NVIDIA A100").has(KEY)
    Table(file, "NVIDIA A100").keep(KEY, RIGHT)
    read = table_of(file.read_text())
    assert read == {("NVIDIA H200", *KEY): KernelConfig({"BLOCK": 32}, 8, 3), ("NVIDIA A100", *KEY): RIGHT}
    assert list(json.loads(file.read_text())) == ["NVIDIA A100", "NVIDIA H200"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_it_says_that_it_needs_a_gpu() -> None:
    done = subprocess.run([sys.executable, "scripts/tune"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "scripts/tune needs a GPU, and there is none here\n")
