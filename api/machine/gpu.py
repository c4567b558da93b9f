"""The GPU: why torch finds none, which one is used, and whether Triton can launch kernels on it."""

import os
import re
import subprocess
import sysconfig
from importlib import metadata
from pathlib import Path

import torch

from baton.api.machine.memory import bytes_of, free_memory, read_text
from baton.kernels.runtime.triton.selection import HAS_TRITON

DRIVER = Path("/proc/driver/nvidia/version")
SMI = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
SMI_TIMEOUT_S = 10.0
OLDEST_DRIVERS = {11: "450.80.02", 12: "525.60.13", 13: "580"}
"""The oldest driver of each CUDA version, by https://docs.nvidia.com/deploy/cuda-compatibility/."""
OLDER_CUDA = "cu126"  # torch's builds for drivers that are too old for its default build
COMPILER_NEEDED = "Triton needs a C compiler and Python's headers: apt install gcc python3-dev"


def driver_version() -> str | None:
    """Return the version of the NVIDIA driver, or None if this machine has none."""
    if match := re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", read_text(DRIVER)):
        return match[1]
    try:
        done = subprocess.run(SMI, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.match(r"\d+(?:\.\d+)+", done.stdout.strip())
    return match[0] if match else None


def missing_gpu() -> str:
    """Return why torch finds no GPU; "" if it finds one, or if neither torch nor this machine is meant for one."""
    if torch.cuda.is_available():
        return ""
    driver, cuda = driver_version(), torch.version.cuda
    if torch.version.hip is not None:
        return f"torch {torch.__version__}, built for ROCm {torch.version.hip}, finds no GPU: {_error_of_torch()}"
    if cuda is None:
        return _torch_without_cuda(driver) if driver is not None else ""
    if driver is None:
        return f"torch {torch.__version__} is built for CUDA {cuda}, and this machine has no NVIDIA driver"
    versions = f"the NVIDIA driver {driver} and torch {torch.__version__}, built for CUDA {cuda}"
    oldest = OLDEST_DRIVERS.get(int(cuda.partition(".")[0]))
    if oldest is not None and _numbers(driver) < _numbers(oldest):
        return f"{versions}: this CUDA needs a driver of {oldest} or newer. Update the driver{_or_older_cuda(driver)}"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    note = f" (CUDA_VISIBLE_DEVICES={hidden!r})" if hidden is not None else ""
    return f"{versions}: {_error_of_torch()}{note}"


def describe_gpus() -> str:
    """Return the names and the free memory of all GPUs with the versions of driver and CUDA; or why there is none."""
    if not torch.cuda.is_available():
        why = missing_gpu()
        return f"none: {why}" if why else "none"
    gpus = [describe_gpu(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
    return f"{', '.join(gpus)}; driver {driver_version() or 'unknown'}, CUDA {torch.version.cuda or 'none'}"


def describe_gpu(device: torch.device) -> str:
    """Return the name of a GPU, and how much of its memory is free."""
    total = torch.cuda.get_device_properties(device).total_memory
    free = f"{bytes_of(free_memory(device))} of {bytes_of(total)} free"
    return f"{device}: {torch.cuda.get_device_name(device)}, {free}"


def broken_triton(device: torch.device) -> str:
    """Launch a small kernel on a GPU. Return why that fails, and what would help; "" if it runs.

    At its first launch Triton compiles C code, so an image without a compiler fails here and not while it serves.
    """
    from baton.kernels.runtime.triton.probe import probe

    try:
        probe(device)
    except Exception as error:  # whatever Triton raises: RuntimeError, CalledProcessError, OSError, AssertionError
        return explain(error)
    return ""


def describe_triton() -> str:
    """Return whether Triton computes on the GPU in use, and if not, why."""
    if not HAS_TRITON:
        return "none"
    version = metadata.version("triton")
    if not torch.cuda.is_available():
        return f"{version}, which needs a GPU"
    why = broken_triton(torch.device("cuda", torch.cuda.current_device()))
    return f"{version}, which cannot launch a kernel: {why}" if why else f"{version}, which launches kernels"


def explain(error: Exception) -> str:
    """Return why Triton's first launch failed, with what to install if something is missing."""
    text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    compiler = os.environ.get("CC")
    if isinstance(error, FileNotFoundError | PermissionError) and compiler is not None:
        return f"the compiler CC={compiler} cannot be run. {COMPILER_NEEDED}, or set CC"
    if "C compiler" in str(error):
        return f"there is no C compiler. {COMPILER_NEEDED}, or set CC"
    if isinstance(error, subprocess.CalledProcessError):
        missing = f"there is no {headers}" if not headers.exists() else f"{error.cmd[0]} failed with {error.returncode}"
        return f"{missing}. {COMPILER_NEEDED}"
    return text


def _torch_without_cuda(driver: str) -> str:
    built = f"torch {torch.__version__} is built without CUDA, and this machine has the NVIDIA driver {driver}"
    index = "" if _numbers(driver) >= _numbers(OLDEST_DRIVERS[13]) else _older_cuda(driver)
    return f"{built}: install a torch with CUDA{f', as {index}' if index else ''}"


def _or_older_cuda(driver: str) -> str:
    older = _older_cuda(driver)
    return f", or install a torch for an older CUDA: {older}" if older else ""


def _older_cuda(driver: str) -> str:
    """Return the command that installs a torch for an older CUDA; "" if the driver is too old for that too."""
    if _numbers(driver) < _numbers(OLDEST_DRIVERS[12]):
        return ""
    version = torch.__version__.partition("+")[0]
    return f"pip install torch=={version} --index-url https://download.pytorch.org/whl/{OLDER_CUDA}"


def _error_of_torch() -> str:
    """Return the reason that torch gives."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().partition("\n")[0]
    return "torch gives no reason"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))
