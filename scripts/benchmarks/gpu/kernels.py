"""The parts `kernels` and `speed`: each kernel's error against its reference, and its time against its floor."""

from functools import partial

import torch

from scripts.benchmarks.gpu.bench import Bench
from scripts.benchmarks.gpu.operation import Draw
from scripts.benchmarks.gpu.peers import PEERS
from scripts.benchmarks.gpu.timing import Ceilings, copies_for, seconds_of


def check(bench: Bench) -> None:
    """Record each kernel's `error`, relative to the tolerance: more than 1 is a failure."""
    for name, build in bench.checked().items():
        for dtype in sorted({torch.float32, bench.dtype}, key=str, reverse=True):
            label = f"{name}, {str(dtype).removeprefix('torch.')}"
            if bench.records.has("kernels", label):
                continue
            seed = int.from_bytes(label.encode()) % 2**31
            try:
                error = build(Draw(bench.device, dtype, seed)).error(dtype)
            except torch.AcceleratorError:
                raise
            except Exception as failure:
                bench.failed("kernels", label, repr(failure)[:300])
                continue
            if error <= 1:
                bench.records.keep("kernels", label, error=error)
            else:
                bench.failed("kernels", label, f"error {error:.3g}")


def time_all(bench: Bench) -> None:
    """Record each kernel's time in these fields:

    microseconds: time of one call.
    share: lower bound of the time, from the ceilings measured in this run, divided by the time.
    bytes_per_second, flops_per_second: lower bounds of the operation's work, divided by the time.
    Each peer that has the kernel: microseconds of the peer's call.
    """
    ceilings = Ceilings.measured(bench.device)
    bench.records.keep("speed", "ceilings", bandwidth=ceilings.bandwidth, rate=ceilings.rate)
    for name, build in bench.timed().items():
        if bench.records.has("speed", name):
            continue
        first = build(Draw(bench.device, bench.dtype))
        # Enough copies of the inputs that the GPU's cache no longer holds a copy when the copy is used again.
        more = range(1, copies_for(first.nbytes, bench.device))
        operations = [first, *(build(Draw(bench.device, bench.dtype, seed)) for seed in more)]
        seconds = seconds_of([partial(each.run, *each.inputs) for each in operations], bench.device)
        figures = {
            "microseconds": seconds * 1e6,
            "share": first.floor(ceilings.bandwidth, ceilings.rate) / seconds,
            "bytes_per_second": first.nbytes / seconds,
            "flops_per_second": first.flops / seconds,
        }
        del operations
        bench.records.keep("speed", name, **figures, **of_peers(name, bench.device))


def of_peers(name: str, device: torch.device) -> dict[str, float]:
    """Return the microseconds of each installed peer that has this operation. Failures are printed."""
    found = dict[str, float]()
    for peer, prepare in PEERS.items():
        try:
            run = prepare(name, device)
            if run is not None:
                found[peer] = seconds_of([run], device) * 1e6
        except Exception as error:
            print(f"{peer}: {error!r}"[:300])
    return found
