"""`baton doctor`: this machine's hardware, and which kernels run on it."""

import os
import platform
from importlib import import_module

import msgspec
import torch

from baton.api.machine.gpu import describe_gpus, describe_triton
from baton.api.machine.threads import SETTINGS
from baton.api.version import VERSION
from baton.kernels.runtime import cpp
from baton.kernels.runtime.cpp.bandwidth import read_bandwidth
from baton.kernels.runtime.cpp.build import KERNELS
from baton.kernels.runtime.cpp.cache import cache_folder
from baton.kernels.runtime.cpp.prepare import Prepared, prepare
from baton.kernels.runtime.cpp.targets import cpu_features

# Prefixes of the names of CPU features that make kernels fast.
FAST_FEATURES = ("avx2", "avx512", "avx_vnni", "amx", "asimd", "bf16", "f16c", "fma", "i8mm", "sve")


def doctor(as_json: bool) -> int:
    """Print the findings about this machine, and return the exit code."""
    found = examine()
    if as_json:
        print(msgspec.json.encode(found).decode())
    else:
        for name, value in found.items():
            print(f"{name:<33} {value}")
    return 0


def examine() -> dict[str, str]:
    """Return the findings by label. Prepare and install native code for that, as the server does at its start."""
    names, threads = operations(), torch.get_num_threads()
    prepared = prepare()
    prepared.install(threads)
    features = [name for name in sorted(cpu_features()) if name.startswith(FAST_FEATURES)]
    return {
        "baton": f"{VERSION}, torch {torch.__version__}, Python {platform.python_version()}",
        "cpu": f"{platform.machine()}, {os.cpu_count()} logical cores: {' '.join(features) or 'features unknown'}",
        "gpu": describe_gpus(),
        "triton": describe_triton(),
        "target": prepared.target.name if prepared.target is not None else "none",
        "compiler": describe_compiler(prepared),
        "cache": f"{cache_folder()}{', not used: ' + prepared.cache_problem if prepared.cache_problem else ''}",
        "native code": describe_library(prepared),
        "threads": describe_threads(threads),
        "memory": ", ".join(
            f"{read_bandwidth(n) / 1e9:.0f} GB/s read by {n} thread{'s' * (n > 1)}" for n in sorted({1, threads})
        ),
        **{f"kernel {name}": describe_kernel(name, prepared) for name in names},
    }


def describe_compiler(prepared: Prepared) -> str:
    compiler = prepared.compiler
    if prepared.prebuilt:
        return "not needed: native code was installed with the wheel"
    return "none" if compiler is None else f"{' '.join(compiler.command)} ({compiler.version})"


def describe_library(prepared: Prepared) -> str:
    if prepared.problem:
        return f"none: {prepared.problem}"
    origin = "installed" if prepared.prebuilt else "compiled" if prepared.compiled else "found in the cache"
    return f"{origin}, ready in {prepared.seconds:.2f} s"


def describe_threads(threads: int) -> str:
    spinning = ", ".join(f"{name}={os.environ[name]}" for name in SETTINGS if name in os.environ)
    return f"{threads} for a large model; {spinning}"


def operations() -> list[str]:
    """Return the names of all operations, and import them, so that they declare their native functions.

    An operation is a folder below kernels/ with a reference.py, or the folder of CPU graphs, with a recording.py.
    """
    folders = [file.parent for pattern in ("reference.py", "recording.py") for file in KERNELS.rglob(pattern)]
    names = sorted(".".join(folder.relative_to(KERNELS).parts) for folder in folders)
    for name in names:
        import_module(f"baton.kernels.{name}")
    return names


def describe_kernel(name: str, prepared: Prepared) -> str:
    """Return for each native function of an operation whether native code or torch computes it; "torch" without any."""
    functions = cpp.declared({name})
    if not functions:
        return "torch"
    return ", ".join(
        f"{function}: {'native' if cpp.function(function) is not None else 'torch'}"
        + (f" ({prepared.left_out[function]})" if function in prepared.left_out else "")
        for function in functions
    )
