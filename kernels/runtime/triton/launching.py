"""How a Triton kernel is launched; the one place where that happens."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from baton.kernels.runtime.triton.configs import KernelConfig


@dataclass(frozen=True, slots=True)
class Launch:
    """arguments: in the kernel's order, without its constants."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    config: KernelConfig

    def run(self) -> None:
        options = {"num_warps": self.config.warps_of(_threads_a_warp()), "num_stages": self.config.stages}
        self.kernel[self.grid](*self.arguments, **self.constants, **self.config.blocks, **options)


@cache
def _threads_a_warp() -> int:
    """All GPUs of a process are alike."""
    return 32 if torch.version.hip is None else int(torch.cuda.get_device_properties().warp_size)


_watcher: Callable[[Launch], None] | None = None


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, config: KernelConfig, **constants: Any) -> None:
    """Enqueue a kernel on the current stream. constants: its constexprs, other than config's blocks.

    Tensors begin at multiples of 16 bytes, for else Triton compiles the kernel a second time.
    """
    if 0 in grid:
        return
    wanted = Launch(kernel, grid, arguments, constants, config)
    if _watcher is None:
        wanted.run()
    else:
        _watcher(wanted)


@contextmanager
def watched(on_launch: Callable[[Launch], None]) -> Iterator[None]:
    """Meanwhile kernels are not run: on_launch is told of them. In one thread at a time."""
    global _watcher
    assert _watcher is None
    _watcher = on_launch
    try:
        yield
    finally:
        _watcher = None
