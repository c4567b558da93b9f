"""The launch of Triton kernels; all launches go through `launch`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from baton.kernels.runtime.triton import direct
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
        direct.run(self.kernel, self.grid, self.arguments, self.constants, self.config)


_watcher: Callable[[Launch], None] | None = None


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, config: KernelConfig, **constants: Any) -> None:
    """Enqueue a kernel on the current stream.

    Tensors must begin at multiples of 16 bytes, because Triton compiles another variant for unaligned ones.

    arguments: pointers and numbers, in the kernel's order.
    constants: the kernel's constexprs, other than config's blocks.
    """
    if 0 in grid:
        return
    if _watcher is None:
        direct.run(kernel, grid, arguments, constants, config)
    else:
        _watcher(Launch(kernel, grid, arguments, constants, config))


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
