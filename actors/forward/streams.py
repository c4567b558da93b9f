"""Streams of a device: work that is enqueued on a stream is executed in order, while the host continues."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A point in a stream."""

    def wait(self) -> None:
        """Block the calling thread until everything that was enqueued before this point is done."""
        ...

    def passed(self) -> bool:
        """Return whether everything that was enqueued before this point is done."""
        ...

    def seconds_since(self, earlier: "Event") -> float:
        """Return the device's time between two points of one stream, both of which have passed."""
        ...


class Stream(Protocol):
    """An order of execution on a device. Events may be used from any thread.

    All calls except `enter_thread` come from one thread.
    """

    device: torch.device
    can_capture: bool  # whether replaying a capture costs less than enqueueing its work again

    def enter_thread(self) -> None:
        """Make the calling thread use this device. Every thread that uses the device calls this first."""
        ...

    def active(self) -> AbstractContextManager[None]:
        """Return a context in which all that torch and Triton enqueue in this thread goes to this stream."""
        ...

    def host_buffer(self, nbytes: int) -> Tensor:
        """Return uint8 [nbytes] in host memory, uninitialised; pinned if the device can copy from it by itself."""
        ...

    def upload(self, host: Tensor, device: Tensor) -> None:
        """Enqueue a copy to the device, which reads `host` later. Both tensors: contiguous, equal shapes and dtypes."""
        ...

    def download(self, device: Tensor, host: Tensor) -> None:
        """Enqueue a copy to the host, which writes `host` later. Both tensors: contiguous, equal shapes and dtypes."""
        ...

    def record(self) -> Event:
        """Return the point after everything that has been enqueued so far."""
        ...

    def wait(self, event: Event) -> None:
        """Make everything that is enqueued from now on wait for `event`, which may be another stream's."""
        ...

    def beside(self) -> "Stream":
        """Return another stream of the device, or this one if the device has no other."""
        ...

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Capture the work that `run` enqueues, without executing it. Return a function that enqueues it again.

        Each replay uses the same memory. `run` must have run before, because compilation and allocation at first use
        cannot be captured. All captures of a stream share the memory of the tensors that they create, so a result must
        be copied into a tensor that existed before the capture.
        """
        ...


class PassedEvent:
    """The event of a device on which nothing is ever in flight."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def seconds_since(self, earlier: "Event") -> float:
        assert isinstance(earlier, PassedEvent)
        return self._at - earlier._at

    def wait(self) -> None:
        return

    def passed(self) -> bool:
        return True


class CpuStream:
    """The stream of a CPU, which executes everything at once."""

    can_capture = False

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def enter_thread(self) -> None:
        return

    def active(self) -> AbstractContextManager[None]:
        return nullcontext()

    def host_buffer(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def upload(self, host: Tensor, device: Tensor) -> None:
        device.copy_(host)

    def download(self, device: Tensor, host: Tensor) -> None:
        host.copy_(device)

    def record(self) -> Event:
        return PassedEvent()

    def wait(self, event: Event) -> None:
        event.wait()

    def beside(self) -> "Stream":
        return self

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Return `run` itself: on a CPU a capture would save nothing."""
        return run
