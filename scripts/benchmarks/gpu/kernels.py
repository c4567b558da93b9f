"""The parts about kernels: whether each equals its reference, and how near each comes to the least it can cost."""

import torch

from scripts.benchmarks.gpu.bench import Bench
from scripts.benchmarks.gpu.operation import Draw
from scripts.benchmarks.gpu.peers import PEERS
from scripts.benchmarks.gpu.timing import Ceilings, copies_for, seconds_of


def check(bench: Bench) -> None:
    """error: in terms of what is tolerated; more than 1 is wrong."""
    for name, build in bench.checked().items():
        for dtype in sorted({torch.float32, bench.dtype}, key=str, reverse=True):
            of = f"{name}, {str(dtype).removeprefix('torch.')}"
            if bench.records.has("kernels", of):
                continue
            seed = int.from_bytes(of.encode()) % 2**31
            try:
                error = build(Draw(bench.device, dtype, seed)).error(dtype)
            except torch.AcceleratorError:
                raise
            except Exception as failure:
                bench.failed("kernels", of, repr(failure)[:300])
                continue
            if error <= 1:
                bench.records.keep("kernels", of, error=error)
            else:
                bench.failed("kernels", of, f"error {error:.3g}")


def time_all(bench: Bench) -> None:
    """microseconds of a call; share: of the floor, by the ceilings of the same run; peers: their microseconds."""
    ceilings = Ceilings.measured(bench.device)
    bench.records.keep("speed", "ceilings", bandwidth=ceilings.bandwidth, rate=ceilings.rate)
    for name, build in bench.timed().items():
        if bench.records.has("speed", name):
            continue
        first = build(Draw(bench.device, bench.dtype))
        more = range(1, copies_for(first.nbytes, bench.device))
        operations = [first, *(build(Draw(bench.device, bench.dtype, seed)) for seed in more)]
        seconds = seconds_of([lambda each=each: each.run(*each.inputs) for each in operations], bench.device)
        figures = {
            "microseconds": seconds * 1e6,
            "share": first.floor(ceilings.bandwidth, ceilings.rate) / seconds,
            "bytes_per_second": first.nbytes / seconds,
            "flops_per_second": first.flops / seconds,
        }
        del operations
        bench.records.keep("speed", name, **figures, **of_peers(name, bench.device))


def of_peers(name: str, device: torch.device) -> dict[str, float]:
    """Microseconds of those that are here and have it; why one of them fails is told."""
    found = dict[str, float]()
    for peer, prepare in PEERS.items():
        try:
            run = prepare(name, device)
            if run is not None:
                found[peer] = seconds_of([run], device) * 1e6
        except Exception as error:
            print(f"{peer}: {error!r}"[:300])
    return found
