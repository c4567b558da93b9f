"""Which configuration of a kernel is the fastest on this GPU, at the shapes that are timed."""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baton.kernels.runtime.triton import KernelConfig, chosen, watched
from scripts.benchmarks.gpu.operation import Draw, Operation, difference
from scripts.benchmarks.gpu.operations.listed import TIMED
from scripts.benchmarks.gpu.timing import seconds_of

Key = tuple[str, str]
"""A kernel's name and its shape, as kernels.runtime.triton.config_of has them."""
Seconds = Callable[[Operation], float]
# Of the default's time: what is gained must be more than the noise.
WORTH_IT = 0.98


class Table:
    """configs.json: written after each choice, so that a run can be taken up again."""

    def __init__(self, file: Path, gpu: str) -> None:
        self._file, self._gpu = file, gpu
        self._read: dict[str, dict[str, dict[str, Any]]] = json.loads(file.read_text("utf-8"))

    def has(self, key: Key) -> bool:
        kernel, shape = key
        return shape in self._read.get(self._gpu, {}).get(kernel, {})

    def keep(self, key: Key, config: KernelConfig) -> None:
        kernel, shape = key
        values = {"blocks": dict(config.blocks), "warps": config.warps, "stages": config.stages}
        self._read.setdefault(self._gpu, {}).setdefault(kernel, {})[shape] = values
        written = self._file.with_suffix(".part")
        written.write_text(json.dumps(self._read, indent=1, sort_keys=True) + "\n", "utf-8")
        written.replace(self._file)


def tune(file: Path, wanted: tuple[str, ...], again: bool) -> int:
    """On the GPU that is here; wanted: what names of kernels begin with, none: all."""
    device = torch.device("cuda")
    table = Table(file, torch.cuda.get_device_name())
    operations = {name: lambda build=build: build(Draw(device, torch.bfloat16)) for name, build in TIMED.items()}
    for key, (candidates, users) in choices(operations).items():
        if key[0].startswith(wanted or "") and len(candidates) > 1 and (again or not table.has(key)):
            best, gain = fastest(key, candidates, [operations[user] for user in users], measured)
            table.keep(key, best)
            print(f"{key[0]} {key[1]}: {best}, {gain:.2f} of the default's time", flush=True)
    return 0


Found = dict[Key, tuple[tuple[KernelConfig, ...], list[str]]]


def choices(operations: dict[str, Callable[[], Operation]]) -> Found:
    """What there is to choose, and the operations that show it best: those in which least else is launched."""
    offered, users = dict[Key, tuple[KernelConfig, ...]](), defaultdict[Key, list[tuple[int, str]]](list)
    for name, build in operations.items():
        met = list[Key]()

        def choose(kernel: str, shape: str, candidates: tuple[KernelConfig, ...], met: list[Key] = met) -> KernelConfig:
            offered[kernel, shape] = different(candidates)
            met.append((kernel, shape))
            return candidates[0]

        launches = list[object]()
        operation = build()
        with chosen(choose), watched(launches.append):
            operation.run(*operation.inputs)
        for key in set(met):
            users[key].append((len(launches), name))
    least = {key: min(of)[0] for key, of in users.items()}
    return {
        key: (offered[key], [name for count, name in of if count == least[key]]) for key, of in sorted(users.items())
    }


def different(candidates: Iterable[KernelConfig]) -> tuple[KernelConfig, ...]:
    kept = list[KernelConfig]()
    for config in candidates:
        if config not in kept:
            kept.append(config)
    return tuple(kept)


def fastest(
    key: Key, candidates: tuple[KernelConfig, ...], builds: list[Callable[[], Operation]], seconds: Seconds
) -> tuple[KernelConfig, float]:
    """And its time in terms of the default's, the mean over all operations. What fails or computes otherwise is out."""
    times = defaultdict[int, list[float]](list)
    for build in builds:
        operation = build()
        kept = [each.clone() for each in operation.inputs]
        expected = None
        for number, config in enumerate(candidates):
            with chosen(lambda kernel, shape, others, config=config: config if (kernel, shape) == key else others[0]):
                found = outcome(operation, kept)
                if expected is None:
                    expected = found
                if found is not None and expected is not None and agree(found, expected):
                    times[number].append(seconds(operation))
    default = times[0]
    whole = {number: of for number, of in times.items() if len(of) == len(builds)}
    if 0 not in whole:
        raise RuntimeError(f"the default of {key} does not run")
    scores = {
        number: math.exp(sum(math.log(one / base) for one, base in zip(of, default, strict=True)) / len(of))
        for number, of in whole.items()
    }
    best = min(scores, key=lambda number: scores[number])
    return (candidates[best], scores[best]) if scores[best] < WORTH_IT else (candidates[0], 1.0)


def outcome(operation: Operation, kept: list[Tensor]) -> list[Tensor] | None:
    """What it computes from the inputs as they were; None if this GPU cannot run it so."""
    for each, original in zip(operation.inputs, kept, strict=True):
        each.copy_(original)
    try:
        found = [each.clone() for each in operation.run(*operation.inputs)]
        if found[0].is_cuda:
            torch.cuda.synchronize()
    except Exception as error:  # Triton's out of resources, of compilation, ...
        print(f"  {type(error).__name__}: {str(error)[:120]}", flush=True)
        return None
    return found


def agree(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(difference(one, other, torch.bfloat16) <= 1 for one, other in zip(found, expected, strict=True))


def measured(operation: Operation) -> float:
    return seconds_of([lambda: operation.run(*operation.inputs)], operation.inputs[0].device)
