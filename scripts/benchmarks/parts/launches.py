"""Host time of Triton launches, without a GPU: kernels are compiled for an H100, and a driver that does nothing."""

import argparse
import re
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from scripts.benchmarks.common.contenders import Workbench

if TYPE_CHECKING:
    from baton.kernels.runtime.triton import Launch

REPEATS = 20


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", metavar="REGEX", help="measure only operations whose names match")


def run(options: argparse.Namespace, workbench: Workbench) -> None:
    """Print, for each operation, its launches and the microseconds that each of them takes.

    all: everything that the operation does, such as torch.empty and sizes, divided by its launches.
    launch: the launch alone. triton: the same launch by Triton's own way.
    """
    from scripts.benchmarks.gpu.fake_driver import fake_driver
    from scripts.benchmarks.gpu.operation import Draw
    from scripts.benchmarks.gpu.operations.listed import TOYS

    print(f"{'operation':<36}{'launches':>9}{'all':>8}{'launch':>8}{'triton':>8}  µs a launch")
    with fake_driver(lambda *_: None):
        for name, build in TOYS.items():
            if re.search(options.only, name):
                operation = build(Draw(torch.device("cpu"), torch.bfloat16))
                measure(name, partial(operation.run, *operation.inputs), options.rounds or 50)


def measure(name: str, operation: Callable[[], object], rounds: int) -> None:
    """Print one line. Compile the operation's kernels first."""
    from baton.kernels.runtime.triton import Launch, watched

    launches = list[Launch]()
    with watched(launches.append):
        operation()
    operation()

    def run_all() -> None:
        for launch in launches:
            launch.run()

    def run_all_by_triton() -> None:
        for launch in launches:
            by_triton(launch)

    calls = operation, run_all, run_all_by_triton
    columns = "".join(f"{microseconds(call, rounds) / len(launches):>8.1f}" for call in calls)
    print(f"{name:<36}{len(launches):>9}{columns}", flush=True)


def by_triton(launch: "Launch") -> None:
    config = launch.config
    options = {"num_warps": config.warps, "num_stages": config.stages}
    launch.kernel[launch.grid](*launch.arguments, **launch.constants, **config.blocks, **options)


def microseconds(call: Callable[[], object], rounds: int) -> float:
    """Return the least processor time of a call, the mean of REPEATS calls in a row."""
    times = list[float]()
    for _ in range(rounds):
        begin = time.thread_time()
        for _ in range(REPEATS):
            call()
        times.append((time.thread_time() - begin) / REPEATS)
    return min(times) * 1e6
