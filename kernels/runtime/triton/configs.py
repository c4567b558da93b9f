"""Block sizes of kernels by device, kernel and shape.

Block sizes are tuned offline, never at run time: kernels update states in place, so trial runs would corrupt them.
"""

import json
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property, wraps
from importlib.resources import files
from typing import Any, ParamSpec, cast

import torch

TABLE = "configs.json"


@dataclass(frozen=True)
class KernelConfig:
    """The launch parameters of a kernel: block sizes, warps and pipeline stages."""

    blocks: Mapping[str, int] = field(default_factory=dict)  # values of the kernel's tunable constexprs, by name
    warps: int = 4  # number of warps, of 32 threads each
    stages: int = 2  # stages of pipelined loops

    @cached_property
    def key(self) -> Hashable:
        """Everything above as a value that can be hashed."""
        return (tuple(self.blocks.items()), self.warps, self.stages)

    def warps_of(self, threads: int) -> int:
        """Convert `warps` to a number of warps of `threads` threads each, because AMD's warps may have 64 threads."""
        return max(1, self.warps * 32 // threads)


# Parameters of a function that looks up a configuration.
P = ParamSpec("P")
# A function that chooses a configuration, given a kernel, a shape and the configurations to choose from, default first.
Chooser = Callable[[str, str, tuple[KernelConfig, ...]], KernelConfig]
_chooser: Chooser | None = None


def config_of(
    kernel: str, shape: str, device: torch.device, default: KernelConfig, *others: KernelConfig
) -> KernelConfig:
    """Return the configuration that scripts/tune found best for this kind of GPU, else the default.

    kernel: "operation.kernel".
    shape: everything that the best choice depends on, such as "heads=128 width=64 float32".
    others: what scripts/tune tries in addition to the default.
    """
    if _chooser is not None:
        return _chooser(kernel, shape, (default, *others))
    if device.type != "cuda":
        return default
    return _table().get((_name(device.index or 0), kernel, shape), default)


def by_shape(look_up: Callable[P, KernelConfig]) -> Callable[P, KernelConfig]:
    """Cache a function that calls config_of, so that a launch of a known shape makes neither texts nor candidates.

    The arguments must be hashable, and determine the result. While `chosen` is in effect, nothing is cached.
    """
    known = cast(Callable[P, KernelConfig], cache(look_up))

    @wraps(look_up)
    def choose(*args: P.args, **kwargs: P.kwargs) -> KernelConfig:
        return (known if _chooser is None else look_up)(*args, **kwargs)

    return choose


@contextmanager
def chosen(choose: Chooser) -> Iterator[None]:
    """Let `choose` pick all configurations, on every device, for tuning and for tests. Not thread-safe."""
    global _chooser
    assert _chooser is None
    _chooser = choose
    try:
        yield
    finally:
        _chooser = None


@cache
def _name(index: int) -> str:
    """Return the name of a GPU."""
    return torch.cuda.get_device_name(index)


@cache
def _table() -> dict[tuple[str, str, str], KernelConfig]:
    """Read configs.json: {device: {kernel: {shape: {"blocks": {…}, "warps": …, "stages": …}}}}."""
    return table_of(files(__package__).joinpath(TABLE).read_text("utf-8"))


def table_of(text: str) -> dict[tuple[str, str, str], KernelConfig]:
    """Parse the text of configs.json: configurations by (device, kernel, shape)."""
    read: dict[str, dict[str, dict[str, Any]]] = json.loads(text)
    return {
        (device, kernel, shape): KernelConfig(**config)
        for device, kernels in read.items()
        for kernel, shapes in kernels.items()
        for shape, config in shapes.items()
    }
