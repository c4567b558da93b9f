"""Block sizes of kernels, by device, kernel and shape: never tried out at run time, which would write states."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import torch

TABLE = "configs.json"


@dataclass(frozen=True)
class KernelConfig:
    """blocks: the kernel's constexprs that are free to choose. warps of 32 threads; stages of pipelined loops."""

    blocks: Mapping[str, int] = field(default_factory=dict)
    warps: int = 4
    stages: int = 2

    def warps_of(self, threads: int) -> int:
        """How many warps of so many threads are as many threads; AMD's may have 64."""
        return max(1, self.warps * 32 // threads)


# Of a kernel, a shape and what there is to choose from, the default first.
Chooser = Callable[[str, str, tuple[KernelConfig, ...]], KernelConfig]
_chooser: Chooser | None = None


def config_of(
    kernel: str, shape: str, device: torch.device, default: KernelConfig, *others: KernelConfig
) -> KernelConfig:
    """The one that scripts/tune found best for this kind of GPU, else the default. others: what it tries beside that.

    kernel: "operation.kernel"; shape: all that the best choice depends on, such as "heads=128 width=64 float32".
    """
    if _chooser is not None:
        return _chooser(kernel, shape, (default, *others))
    if device.type != "cuda":
        return default
    return _table().get((_name(device.index or 0), kernel, shape), default)


@contextmanager
def chosen(choose: Chooser) -> Iterator[None]:
    """Meanwhile `choose` decides, wherever tensors lie: for tuning and for tests. In one thread at a time."""
    global _chooser
    assert _chooser is None
    _chooser = choose
    try:
        yield
    finally:
        _chooser = None


@cache
def _name(index: int) -> str:
    return torch.cuda.get_device_name(index)


@cache
def _table() -> dict[tuple[str, str, str], KernelConfig]:
    """configs.json: {device: {kernel: {shape: {"blocks": {…}, "warps": …, "stages": …}}}}."""
    return table_of(files(__package__).joinpath(TABLE).read_text("utf-8"))


def table_of(text: str) -> dict[tuple[str, str, str], KernelConfig]:
    """What configs.json says, by device, kernel and shape."""
    read: dict[str, dict[str, dict[str, Any]]] = json.loads(text)
    return {
        (device, kernel, shape): KernelConfig(**config)
        for device, kernels in read.items()
        for kernel, shapes in kernels.items()
        for shape, config in shapes.items()
    }
