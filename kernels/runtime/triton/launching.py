"""The launch of Triton kernels; all launches go through `launch`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from baton.kernels.runtime.triton.configs import KernelConfig


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a kernel."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]  # pointers and numbers, in the kernel's order
    constants: dict[str, Any]  # constexprs other than those in `config`
    config: KernelConfig

    def run(self) -> None:
        """Enqueue the kernel on the current stream."""
        options = {"num_warps": self.config.warps_of(_threads_a_warp()), "num_stages": self.config.stages}
        self.kernel[self.grid](*self.arguments, **self.constants, **self.config.blocks, **options)


@cache
def _threads_a_warp() -> int:
    """Return the threads per warp; all GPUs of a process are assumed to be alike."""
    return 32 if torch.version.hip is None else int(torch.cuda.get_device_properties().warp_size)


_watcher: Callable[[Launch], None] | None = None


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, config: KernelConfig, **constants: Any) -> None:
    """Enqueue a kernel on the current stream.

    Tensors must begin at multiples of 16 bytes, because Triton compiles another variant for unaligned ones.

    arguments: pointers and numbers, in the kernel's order.
    constants: the kernel's constexprs, other than config's blocks.
    """
    if 0 in grid:
        return
    prepared = Launch(kernel, grid, arguments, constants, config)
    if _watcher is None:
        prepared.run()
    else:
        _watcher(prepared)


@contextmanager
def watched(on_launch: Callable[[Launch], None]) -> Iterator[None]:
    """Pass launches to `on_launch` instead of running them. Not thread-safe."""
    global _watcher
    assert _watcher is None
    _watcher = on_launch
    try:
        yield
    finally:
        _watcher = None
