"""A device's streams: what is enqueued on one is done in order, while the host goes on."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A place in a stream."""

    def wait(self) -> None:
        """Block the calling thread until all that was enqueued before this place is done."""
        ...

    def passed(self) -> bool: ...

    def seconds_since(self, earlier: "Event") -> float:
        """Of the device's time, between two places of one stream that both have passed."""
        ...


class Stream(Protocol):
    """One order of execution on a device. All calls come from one thread; its events are anyone's.

    can_capture: whether a replay costs less than enqueueing anew.
    """

    device: torch.device
    can_capture: bool

    def active(self) -> AbstractContextManager[None]:
        """What torch and Triton enqueue meanwhile, in this thread, goes to this stream."""
        ...

    def host_buffer(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] on the host, not cleared; pinned where the device copies by itself."""
        ...

    def upload(self, host: Tensor, device: Tensor) -> None:
        """Enqueue a copy; `host` is read when that executes. Both contiguous, of one shape and dtype."""
        ...

    def download(self, device: Tensor, host: Tensor) -> None:
        """Enqueue a copy; `host` is written when that executes. Both contiguous, of one shape and dtype."""
        ...

    def record(self) -> Event:
        """The place behind all that was enqueued so far."""
        ...

    def wait(self, event: Event) -> None:
        """What is enqueued from now on is done after `event`, which is another stream's."""
        ...

    def beside(self) -> "Stream":
        """Another stream of the device, whose order is its own; the same one where there is no other."""
        ...

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """What `run` enqueues is recorded and not done; the result enqueues it again, over the same memory.

        `run` must have run before: what compiles or allocates at first use cannot be recorded. What it makes is memory
        that all captures of a stream share, so a result must be copied into a tensor that was there before.
        """
        ...


class PassedEvent:
    """The event of a device on which nothing is ever pending."""

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
    """A CPU does everything at once."""

    can_capture = False

    def __init__(self) -> None:
        self.device = torch.device("cpu")

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
        """Nothing is saved: `run` itself."""
        return run
