"""A driver of Triton for a GPU that does not exist: kernels are compiled for it, and a launch only calls a function."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

SHARED_BYTES = 227 * 1024
"""Shared memory of one program on the H100."""

OnLaunch = Callable[..., None]
"""Function that is called instead of a launch, with what Triton passes to its launcher: grid (3), stream, function,
metadata, launch metadata, the hooks before and after the launch, and all arguments, constants included."""


class FakeDriver:
    """The part of a Triton driver that compiling and launching use, for an H100. Each loaded kernel gets a number."""

    def __init__(self, on_launch: OnLaunch) -> None:
        self.utils, self._on_launch, self._loaded = self, on_launch, 0

    def launcher_cls(self, source: Any, metadata: Any) -> OnLaunch:
        return self._on_launch

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        """Return a module, a function, and the kernel's registers, spilled registers and maximum threads."""
        self._loaded += 1
        return self._loaded, self._loaded, 32, 0, 1024

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 7

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_BYTES}


@contextmanager
def fake_driver(on_launch: OnLaunch) -> Iterator[None]:
    """Let Triton use a FakeDriver. Kernels that are launched in the meantime must not be launched on a GPU later."""
    before = driver._active
    driver.set_active(FakeDriver(on_launch))
    try:
        yield
    finally:
        driver._active = before
