"""The machine during a measurement: how busy other processes keep it, and its maximal speeds."""

import math
import os
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import torch

from baton.kernels.runtime.cpp.bandwidth import NUMBERS, PASSES, read_bandwidth
from baton.kernels.runtime.cpp.targets import cpu_features, cpu_vendor, machine, permitted, preferred, usable_targets

PROC = Path("/proc")
IDLE = (3, 4)  # columns of /proc/stat: idle, waiting for I/O
# Columns of /proc/stat that count time. Later columns (guests) are already part of user and nice.
COLUMNS = 8
# A measurement is undisturbed if other processes kept at most this many processors busy, on average.
QUIET = 0.1


class Watch:
    """A context manager: `others` is the mean number of processors that other processes used; 0 without /proc."""

    others = 0.0

    def __enter__(self) -> Self:
        self._began, self._busy, self._own = time.monotonic(), all_busy(), own_busy(os.getpid())
        return self

    def __exit__(self, *_: object) -> None:
        busy, own = all_busy() - self._busy, own_busy(os.getpid()) - self._own
        self.others = max(busy - own, 0.0) / (time.monotonic() - self._began)


def all_busy(proc: Path = PROC) -> float:
    """Return the processor seconds used since the machine started, including seconds that its host has stolen."""
    if not (proc / "stat").exists():
        return 0.0
    columns = [int(column) for column in (proc / "stat").read_text().split("\n", 1)[0].split()[1 : 1 + COLUMNS]]
    return sum(ticks for index, ticks in enumerate(columns) if index not in IDLE) / ticks_a_second()


def own_busy(process: int, proc: Path = PROC) -> float:
    """Return the processor seconds of a process and its descendants, including ended processes that were waited for."""
    children, seconds = defaultdict[int, list[int]](list), dict[int, float]()
    for stat in proc.glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        number = int(stat.parent.name)
        children[int(fields[1])].append(number)
        seconds[number] = sum(map(int, fields[11:15])) / ticks_a_second()
    total, pending = 0.0, [process]
    while pending:
        number = pending.pop()
        total += seconds.get(number, 0.0)
        pending.extend(children[number])
    return total


def thread_busy(process: int) -> float:
    """Return the processor seconds of a process's main thread; in Baton's server this thread runs the event loop."""
    fields = (PROC / f"{process}/task/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / ticks_a_second()


def ticks_a_second() -> int:
    return os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Probe:
    """Maximal speeds of the machine, per second."""

    read: float  # bytes read
    updated: float  # bytes read plus bytes written by an in-place update; up to twice `read`: reads and writes overlap
    operations: float  # floating-point operations of a matrix product, in bfloat16 or float32: what is faster


def probe(threads: int) -> Probe:
    return Probe(read_bandwidth(threads), update_bandwidth(threads), matrix_rate(threads))


def update_bandwidth(threads: int) -> float:
    numbers = torch.ones(NUMBERS)
    return 2 * numbers.nbytes / least_time(lambda: numbers.mul_(1.0), threads)


def matrix_rate(threads: int) -> float:
    """Return the operations per second of torch's fastest matrix product. Without AVX-512 its bfloat16 is very slow."""
    rows, inner, columns = 512, 768, 3072
    seconds = []
    for dtype in (torch.bfloat16, torch.float32):
        a, b = (torch.ones(shape, dtype=dtype) for shape in ((rows, inner), (inner, columns)))
        seconds.append(least_time(partial(torch.matmul, a, b), threads))
    return 2 * rows * inner * columns / min(seconds)


def cpu_name(cpuinfo: Path = PROC / "cpuinfo") -> str:
    """Return the CPU's name and the best target of native code for it."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    targets = permitted(preferred(usable_targets(machine(), cpu_features(cpuinfo)), cpu_vendor(cpuinfo)))
    return f"{names[0] if names else 'unknown CPU'} ({targets[0].name if targets else 'no target'})"


def least_time(compute: Callable[[], object], threads: int) -> float:
    """Return the seconds of the shortest of PASSES runs. torch uses `threads` threads during the runs."""
    before, best = torch.get_num_threads(), math.inf
    torch.set_num_threads(threads)
    try:
        for _ in range(PASSES):
            began = time.perf_counter()
            compute()
            best = min(best, time.perf_counter() - began)
    finally:
        torch.set_num_threads(before)
    return best
