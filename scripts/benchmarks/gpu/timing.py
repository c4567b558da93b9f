"""The time of work on a device, and the device's maximal speeds."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Run = Callable[[], object]


@dataclass(frozen=True)
class Ceilings:
    """Maximal speeds of a device."""

    bandwidth: float  # bytes per second, read plus written
    rate: float  # bfloat16 operations per second of a matrix product

    @classmethod
    def measured(cls, device: torch.device) -> "Ceilings":
        size, edge = (2**29, 8192) if device.type == "cuda" else (2**18, 64)
        source = torch.randn(size, device=device)
        target, (a, b) = torch.empty_like(source), torch.randn(2, edge, edge, dtype=torch.bfloat16, device=device)
        # The driver's copy can be slower than a kernel that reads and writes as much.
        copied = min(
            seconds_of([lambda: target.copy_(source)], device),
            seconds_of([lambda: torch.neg(source, out=target)], device),
        )
        multiplied = seconds_of([lambda: torch.mm(a, b)], device)
        return cls(2 * source.nbytes / copied, 2 * edge**3 / multiplied)


def seconds_of(runs: Sequence[Run], device: torch.device, rounds: int = 15) -> float:
    """Return the seconds of one run: the median time of a round, divided by the number of `runs`.

    A round calls all `runs`. On a GPU it is one CUDA graph, so that launches cost nothing. A CPU has only one round.
    Several runs with their own memory ensure that no run finds its inputs in the cache.
    """
    if device.type != "cuda":
        return _host_seconds(runs) / len(runs)
    replay = captured(runs)
    for _ in range(3):
        replay()
    spans = []
    for _ in range(rounds):
        begin, end = _event(), _event()
        begin.record()
        replay()
        end.record()
        spans.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(float(begin.elapsed_time(end)) for begin, end in spans) / 1000 / len(runs)


def captured(runs: Sequence[Run]) -> Run:
    """Call all `runs` once, then capture them in one CUDA graph. Return a function that replays the graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for run in runs:
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    return graph.replay


def copies_for(nbytes: int, device: torch.device) -> int:
    """Return how many inputs of `nbytes` are needed to exceed a GPU's L2 cache four times; at most 32."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
    return max(1, min(32, -(-4 * cache // max(nbytes, 1))))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _host_seconds(runs: Sequence[Run]) -> float:
    began = time.perf_counter()
    for run in runs:
        run()
    return time.perf_counter() - began
