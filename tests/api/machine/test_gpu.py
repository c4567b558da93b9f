"""The GPU: a missing one is never a silent CPU, and what Triton needs is found missing at the start."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

from baton.api.config import Config
from baton.api.machine import gpu, native
from baton.api.machine.device import SLACK, enter_device, gpu_share, pick_device
from baton.api.machine.gpu import describe_gpus, describe_triton, driver_version, explain, missing_gpu
from baton.api.serve import StartError
from baton.api.wiring import load
from tests.api.machine.fake_cuda import GIB, FakeCuda
from tests.api.server_process import ROOT

CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Thu Feb  2 18:33:11 UTC 2026\nGCC version:  gcc 12\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (root@host)\n"
INDEX = "--index-url https://download.pytorch.org/whl/cu126"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that sets the versions of the driver (None: there is none) and of torch's CUDA (None: none)."""

    def be(driver: str | None, cuda: str | None, version: str = "2.13.0", wording: str = CLOSED, why: str = "") -> None:
        file = tmp_path / "version"
        file.unlink(missing_ok=True)
        if driver is not None:
            file.write_text(wording.format(driver))

        def init() -> None:
            raise RuntimeError(f"{why}\nmore of it")

        monkeypatch.setattr(gpu, "DRIVER", file)
        monkeypatch.setattr(gpu, "SMI", (str(tmp_path / "nvidia-smi"),))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "init", init)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch, "__version__", version)

    return be


@pytest.mark.parametrize("wording", [CLOSED, OPEN])
def test_the_drivers_version_is_the_kernel_modules(machine: Any, wording: str) -> None:
    machine("550.54.15", "13.0", wording=wording)
    assert driver_version() == "550.54.15"


def test_without_the_module_nvidia_smi_knows_the_drivers_version(machine: Any, tmp_path: Path) -> None:
    machine(None, "13.0")
    assert driver_version() is None
    smi = tmp_path / "nvidia-smi"
    for answer, version in (("580.65.06\n580.65.06", "580.65.06"), ("NVIDIA-SMI has failed", None)):
        smi.write_text(f"#!/bin/sh\nprintf '{answer}'\n")
        smi.chmod(0o755)
        assert driver_version() == version


@pytest.mark.parametrize(
    ("driver", "cuda", "version", "parts"),
    [
        ("550.54.15", "13.0", "2.13.0+cu130", ["driver 550.54.15", "CUDA 13.0", "580 or newer", f"2.13.0 {INDEX}"]),
        ("470.57.02", "12.6", "2.13.0+cu126", ["driver 470.57.02", "CUDA 12.6", "525.60.13 or newer"]),
        ("580.65.06", "13.0", "2.13.0+cu130", ["driver 580.65.06", "CUDA 13.0", "torch's own reason"]),
        (None, "13.0", "2.13.0+cu130", ["2.13.0+cu130", "CUDA 13.0", "no NVIDIA driver"]),
        ("580.65.06", None, "2.13.0+cpu", ["2.13.0+cpu is built without CUDA", "driver 580.65.06"]),
        ("550.54.15", None, "2.13.0+cpu", ["2.13.0+cpu is built without CUDA", "driver 550.54.15", INDEX]),
    ],
)
def test_a_gpu_that_cannot_be_used_is_a_warning_with_both_versions(
    machine: Any, driver: str | None, cuda: str | None, version: str, parts: list[str]
) -> None:
    machine(driver, cuda, version, why="torch's own reason")
    with structlog.testing.capture_logs() as logged:
        assert enter_device("auto") == torch.device("cpu")
    [warning] = logged
    assert (warning["event"], warning["log_level"]) == ("no GPU is used", "warning")
    for part in parts:
        assert part in warning["why"]
    assert describe_gpus() == f"none: {warning['why']}"
    with pytest.raises(ValueError, match=r"^--device: there is no GPU to use: ") as refused:
        pick_device("cuda")
    assert str(refused.value).endswith(warning["why"])
    assert (INDEX in warning["why"]) == (INDEX in " ".join(parts)), "no older CUDA where it would not help"


def test_a_hidden_gpu_is_named_as_hidden(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    machine("580.65.06", "13.0", why="No CUDA GPUs are available")
    assert missing_gpu().endswith("No CUDA GPUs are available (CUDA_VISIBLE_DEVICES='')")


def test_torch_without_an_amd_gpu(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(None, None, why="No HIP GPUs are available")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert missing_gpu() == "torch 2.13.0, built for ROCm 6.4, finds no GPU: No HIP GPUs are available"


def test_a_cpu_that_is_meant_is_no_warning(machine: Any) -> None:
    with structlog.testing.capture_logs() as logged:
        machine("550.54.15", "13.0")
        assert enter_device("cpu") == torch.device("cpu")
        machine(None, None, "2.13.0+cpu")
        assert enter_device("auto") == torch.device("cpu")
    assert logged == [] and describe_gpus() == "none"


def test_loading_enters_the_device_of_the_option_and_logs_which_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda().install(monkeypatch)
    with structlog.testing.capture_logs() as logged, pytest.raises(StartError):
        load(Config(model=str(tmp_path / "none"), device="cuda:1"), lambda done, total: None)
    assert list(cuda.entered.values()) == [torch.device("cuda", 1)]
    assert [(line["event"], line["gpu"]) for line in logged] == [
        ("GPU", "cuda:1: NVIDIA H100, 70.0 GiB of 80.0 GiB free")
    ]
    assert enter_device("auto") == enter_device("cuda") == torch.device("cuda", 0)
    assert describe_gpus().count("NVIDIA H100") == 2
    with pytest.raises(ValueError, match="there is no cuda:2; the last GPU is cuda:1"):
        pick_device("cuda:2")


def test_pools_leave_a_twentieth_of_a_gpu_and_at_least_a_gibibyte() -> None:
    assert gpu_share(60 * GIB) == 60 * GIB - int(60 * GIB * SLACK)
    assert gpu_share(8 * GIB) == 7 * GIB
    assert gpu_share(GIB // 2) == 0


def test_a_triton_that_cannot_launch_refuses_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(native, "broken_triton", lambda device: "there is no C compiler")
    monkeypatch.setattr(native.triton, "computes_on", lambda device: True)
    with pytest.raises(ValueError, match="no C compiler; or --kernels torch"):
        native.start_native(Config(), cuda, is_quantized=False)
    monkeypatch.setattr(native, "broken_triton", lambda device: "")
    with structlog.testing.capture_logs() as logged:
        assert native.start_native(Config(), cuda, is_quantized=False) is None
    assert [line["event"] for line in logged] == ["Triton"]


def test_the_doctor_launches_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "needs a GPU" in describe_triton() or torch.cuda.is_available()
    FakeCuda().install(monkeypatch)
    monkeypatch.setattr(gpu, "broken_triton", lambda device: f"{device} is broken")
    assert describe_triton().endswith("which cannot launch a kernel: cuda:0 is broken")
    monkeypatch.setattr(gpu, "broken_triton", lambda device: "")
    assert describe_triton().endswith("which launches kernels")


PROBE = """
import json, os, pathlib, sysconfig
import torch
from triton.backends.nvidia import driver

from baton.api.machine.gpu import broken_triton

driver.CudaDriver.is_active = staticmethod(lambda: True)  # as if there were a GPU
folder, found = pathlib.Path(os.environ["FOLDER"]), {}
paths = sysconfig.get_paths


def attempt(name):
    driver.CudaUtils.__dict__.get("instance") and delattr(driver.CudaUtils, "instance")
    found[name] = broken_triton(torch.device("cpu"))


os.environ["CC"] = "/nonexistent/gcc"
attempt("a compiler that is not there")
del os.environ["CC"]
path, os.environ["PATH"] = os.environ["PATH"], str(folder)
attempt("no compiler")
os.environ["PATH"] = path
sysconfig.get_paths = lambda *scheme, **more: paths(*scheme, **more) | {"include": str(folder)}
attempt("no headers")
print(json.dumps(found))
"""


@pytest.mark.skipif(sys.platform != "linux" or not gpu.HAS_TRITON, reason="Triton is for Linux")
def test_what_triton_compiles_with_is_named_if_it_is_missing(tmp_path: Path) -> None:
    """Triton's own driver compiles its C code here, as at the first launch on a GPU."""
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "CC")}
    (tmp_path / "include").mkdir()
    more = {"FOLDER": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "cache"), "TRITON_LIBCUDA_PATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", PROBE], cwd=ROOT, env=environment | more, capture_output=True, text=True, timeout=120
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["a compiler that is not there"].startswith("the compiler CC=/nonexistent/gcc cannot be run.")
    assert found["no compiler"].startswith("there is no C compiler.")
    assert found["no headers"].startswith(f"there is no {tmp_path}/Python.h.")
    assert all("apt install gcc python3-dev" in why for why in found.values())


def test_an_unknown_failure_of_triton_is_named_with_its_first_line() -> None:
    assert explain(AssertionError("libcuda.so cannot found!\nmore")) == "AssertionError: libcuda.so cannot found!"
