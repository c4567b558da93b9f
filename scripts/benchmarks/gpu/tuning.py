"""Search for the fastest configuration of each kernel on this GPU, at the timed shapes."""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baton.kernels.runtime.triton import KernelConfig, chosen, watched
from baton.kernels.runtime.triton.configs import Chooser
from scripts.benchmarks.gpu.operation import Draw, Operation, difference
from scripts.benchmarks.gpu.operations.listed import TIMED, Build
from scripts.benchmarks.gpu.timing import seconds_of

Key = tuple[str, str]
"""(name, shape) of a kernel, as kernels.runtime.triton.config_of takes them."""
Seconds = Callable[[Operation], float]
# A configuration replaces the default if its time is below this share of the default's: smaller gains are noise.
WORTH_IT = 0.98


class Table:
    """The table of configurations in configs.json, written after each choice, so that a run can be resumed."""

    def __init__(self, file: Path, gpu: str) -> None:
        self._file, self._gpu = file, gpu
        self._table: dict[str, dict[str, dict[str, Any]]] = json.loads(file.read_text("utf-8"))

    def has(self, key: Key) -> bool:
        kernel, shape = key
        return shape in self._table.get(self._gpu, {}).get(kernel, {})

    def keep(self, key: Key, config: KernelConfig) -> None:
        kernel, shape = key
        values = {"blocks": dict(config.blocks), "warps": config.warps, "stages": config.stages}
        self._table.setdefault(self._gpu, {}).setdefault(kernel, {})[shape] = values
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps(self._table, indent=1, sort_keys=True) + "\n", "utf-8")
        part.replace(self._file)


def tune(file: Path, prefixes: tuple[str, ...], again: bool) -> int:
    """Tune on this machine's GPU.

    file: the table of configurations.
    prefixes: only kernels whose names begin with one of these are tuned; all kernels if empty.
    again: also tune the kernels and shapes that are already in the table.
    """
    device = torch.device("cuda")
    table = Table(file, torch.cuda.get_device_name())
    operations = {name: builder(build, device) for name, build in TIMED.items()}
    for key, (candidates, users) in choices(operations).items():
        if key[0].startswith(prefixes or "") and len(candidates) > 1 and (again or not table.has(key)):
            best, gain = fastest(key, candidates, [operations[user] for user in users], measured)
            table.keep(key, best)
            print(f"{key[0]} {key[1]}: {best}, {gain:.2f} of the default's time", flush=True)
    return 0


def builder(build: Build, device: torch.device) -> Callable[[], Operation]:
    """Return a function that makes the operation with the same inputs in each call."""
    return lambda: build(Draw(device, torch.bfloat16))


Found = dict[Key, tuple[tuple[KernelConfig, ...], list[str]]]


def choices(operations: dict[str, Callable[[], Operation]]) -> Found:
    """Return, for each kernel and shape, the candidate configurations and the names of the operations to time them in.

    These are the operations with this kernel and shape that launch the fewest kernels.
    """
    offered, users = dict[Key, tuple[KernelConfig, ...]](), defaultdict[Key, list[tuple[int, str]]](list)
    for name, build in operations.items():
        keys = list[Key]()

        def choose(
            kernel: str, shape: str, candidates: tuple[KernelConfig, ...], keys: list[Key] = keys
        ) -> KernelConfig:
            offered[kernel, shape] = different(candidates)
            keys.append((kernel, shape))
            return candidates[0]

        launches = list[object]()
        operation = build()
        with chosen(choose), watched(launches.append):
            operation.run(*operation.inputs)
        for key in set(keys):
            users[key].append((len(launches), name))
    least = {key: min(of)[0] for key, of in users.items()}
    return {
        key: (offered[key], [name for count, name in of if count == least[key]]) for key, of in sorted(users.items())
    }


def different(candidates: Iterable[KernelConfig]) -> tuple[KernelConfig, ...]:
    """Return the candidates without duplicates. No set is used, because configurations are not hashable."""
    unique = list[KernelConfig]()
    for config in candidates:
        if config not in unique:
            unique.append(config)
    return tuple(unique)


def fastest(
    key: Key, candidates: tuple[KernelConfig, ...], builds: list[Callable[[], Operation]], seconds: Seconds
) -> tuple[KernelConfig, float]:
    """Return the fastest candidate, and its time relative to the default's: the geometric mean over all operations.

    A candidate is excluded if, in any operation, it fails or its results differ from the default's.
    Raises RuntimeError if the default itself fails.

    key: kernel and shape. candidates: the default first.
    builds: functions that make the operations. seconds: returns the time of an operation.
    """
    times = defaultdict[int, list[float]](list)
    for build in builds:
        operation = build()
        originals = [each.clone() for each in operation.inputs]
        expected = None
        # The default is also measured last, because a GPU's clock is low at first.
        for number, config in (*enumerate(candidates), (0, candidates[0])):
            with chosen(chooser(key, config)):
                found = outcome(operation, originals)
                if expected is None:
                    expected = found
                if found is not None and expected is not None and agree(found, expected):
                    times[number].append(seconds(operation))
        if times[0]:
            times[0][-2:] = [min(times[0][-2:])]
    default = times[0]
    complete = {number: of for number, of in times.items() if len(of) == len(builds)}
    if 0 not in complete:
        raise RuntimeError(f"the default of {key} does not run")
    scores = {
        number: math.exp(sum(math.log(one / base) for one, base in zip(of, default, strict=True)) / len(of))
        for number, of in complete.items()
    }
    best = min(scores, key=lambda number: scores[number])
    return (candidates[best], scores[best]) if scores[best] < WORTH_IT else (candidates[0], 1.0)


def chooser(key: Key, config: KernelConfig) -> Chooser:
    """Return a function that chooses `config` for the kernel and shape `key`, and defaults for all others."""
    return lambda kernel, shape, offered: config if (kernel, shape) == key else offered[0]


def outcome(operation: Operation, originals: list[Tensor]) -> list[Tensor] | None:
    """Return what an operation computes from its original inputs, or None if this GPU cannot run it."""
    for each, original in zip(operation.inputs, originals, strict=True):
        each.copy_(original)
    try:
        found = [each.clone() for each in operation.run(*operation.inputs)]
        if found[0].is_cuda:
            torch.cuda.synchronize()
    except Exception as error:  # for example: out of resources, or a failed compilation
        print(f"  {type(error).__name__}: {str(error)[:120]}", flush=True)
        return None
    return found


def agree(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(difference(one, other, torch.bfloat16) <= 1 for one, other in zip(found, expected, strict=True))


def measured(operation: Operation) -> float:
    return seconds_of([lambda: operation.run(*operation.inputs)], operation.inputs[0].device)
