"""The machine while something is measured: how much of it others take, and what it can do at most."""

import math
import os
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from baton.kernels.runtime.cpp.bandwidth import NUMBERS, PASSES, read_bandwidth

PROC = Path("/proc")
IDLE = (3, 4)
# Busy columns of /proc/stat; guests are counted in user and nice already.
COLUMNS = 8
# Processors that others may take without the figures being worth less.
QUIET = 0.1


class Watch:
    """As a context: measures how many processors other processes took in it. 0 where there is no /proc."""

    others = 0.0

    def __enter__(self) -> Self:
        self._began, self._busy, self._own = time.monotonic(), all_busy(), own_busy(os.getpid())
        return self

    def __exit__(self, *_: object) -> None:
        busy, own = all_busy() - self._busy, own_busy(os.getpid()) - self._own
        self.others = max(busy - own, 0.0) / (time.monotonic() - self._began)


def all_busy(proc: Path = PROC) -> float:
    """Processor seconds since the machine's start, also those that its host took from it."""
    if not (proc / "stat").exists():
        return 0.0
    columns = [int(column) for column in (proc / "stat").read_text().split("\n", 1)[0].split()[1 : 1 + COLUMNS]]
    return sum(ticks for index, ticks in enumerate(columns) if index not in IDLE) / ticks_a_second()


def own_busy(process: int, proc: Path = PROC) -> float:
    """Processor seconds of a process and all that it started, also of those that it has waited for."""
    children, seconds = defaultdict[int, list[int]](list), dict[int, float]()
    for stat in proc.glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        number = int(stat.parent.name)
        children[int(fields[1])].append(number)
        seconds[number] = sum(map(int, fields[11:15])) / ticks_a_second()
    total, open_ones = 0.0, [process]
    while open_ones:
        number = open_ones.pop()
        total += seconds.get(number, 0.0)
        open_ones.extend(children[number])
    return total


def thread_busy(process: int) -> float:
    """Processor seconds of a process's first thread, on which its event loop runs."""
    fields = (PROC / f"{process}/task/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / ticks_a_second()


def ticks_a_second() -> int:
    return os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Probe:
    """What the machine does a second at most: bytes that are read, bytes read and written in place, and operations.

    Memory writes beside what it reads, so that the second is up to twice the first. Operations are of a matrix product
    in bfloat16.
    """

    read: float
    updated: float
    operations: float


def probe(threads: int) -> Probe:
    return Probe(read_bandwidth(threads), update_bandwidth(threads), matrix_rate(threads))


def update_bandwidth(threads: int) -> float:
    numbers = torch.ones(NUMBERS)
    return 2 * numbers.nbytes / least_time(lambda: numbers.mul_(1.0), threads)


def matrix_rate(threads: int) -> float:
    rows, inner, columns = 512, 768, 3072
    a, b = (torch.ones(shape, dtype=torch.bfloat16) for shape in ((rows, inner), (inner, columns)))
    return 2 * rows * inner * columns / least_time(lambda: torch.matmul(a, b), threads)


def least_time(compute: Callable[[], object], threads: int) -> float:
    """Seconds, of a few times. Sets torch's threads for as long as it runs."""
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
