"""A stream of the late device: a queue of operations that have not been executed yet."""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from baton.actors.forward.streams import Event
from tests.late.log import where
from tests.late.tensors import Cell, LateTensor, spoil

if TYPE_CHECKING:
    from tests.late.device import LateDevice

Step = Callable[[], Callable[[], None]]
"""A step of a stream. It is called when it is enqueued, and the function that it returns is called to execute it."""


@dataclass(frozen=True)
class LateEvent:
    """An event that has passed once its stream has executed `place` steps."""

    stream: LateStream
    place: int

    def wait(self) -> None:
        self.stream.late.note("wait", threading.current_thread().name, where())
        self.stream.late.finish(self)

    def passed(self) -> bool:
        """Return whether the event has passed. If the device has a seed, a call may first execute some steps."""
        self.stream.late.pass_time(polled=True)
        return self.has_passed()

    def seconds_since(self, earlier: Event) -> float:
        """Return an artificial time: one microsecond for each step between the two events."""
        assert isinstance(earlier, LateEvent) and self.has_passed() and earlier.stream is self.stream
        return 1e-6 * (self.place - earlier.place)

    def has_passed(self) -> bool:
        return self.stream.done >= self.place


class LateStream:
    """A stream of the late device, with the interface of actors.forward.streams.Stream."""

    device = torch.device("meta")

    def __init__(self, late: LateDevice) -> None:
        self.late, self.can_capture = late, late.can_capture
        self.done = 0  # how many steps have been executed
        self.recording: list[Step] | None = None  # the steps of the capture in progress
        self._queue: deque[Callable[[], None] | LateEvent] = deque()

    def enter_thread(self) -> None:
        self.late.entered.add(threading.current_thread().name)

    def active(self) -> AbstractContextManager[None]:
        return self.late.active(self)

    def host_buffer(self, nbytes: int) -> Tensor:
        return self.late.pinned(nbytes)

    def upload(self, host: Tensor, device: Tensor) -> None:
        """Enqueue a copy to the device. The host buffer must not change before the copy is executed."""
        self._check_copy(host, device)
        to, site = device.cell, where()  # type: ignore[attr-defined]
        device.memory.check_change()  # type: ignore[attr-defined]
        self.late.note("upload", f"{host.nbytes} bytes", site)

        def begin() -> Callable[[], None]:
            before = _checksum(host)

            def copy() -> None:
                if _checksum(host) != before:
                    self.late.note("host buffer", "written before its upload had read it", site)
                self.late.values(to, "upload", site).copy_(host)

            return copy

        self.enqueue(begin)

    def download(self, device: Tensor, host: Tensor) -> None:
        """Enqueue a copy to the host, whose buffer is filled with 0xA5 until the copy is executed."""
        self._check_copy(host, device)
        source, memory, site = device.cell, device.memory, where()  # type: ignore[attr-defined]
        self.late.note("download", f"{host.nbytes} bytes", site)

        def begin() -> Callable[[], None]:
            host.view(torch.uint8).fill_(0xA5)
            before = _checksum(host)

            def copy(_memory: object = memory) -> None:  # The default argument keeps the memory alive until the copy.
                if _checksum(host) != before:
                    self.late.note("host buffer", "written before its download had filled it", site)
                host.copy_(self.late.values(source, "download", site))

            return copy

        self.enqueue(begin)

    def record(self) -> Event:
        assert self.recording is None, "an event is no part of a capture"
        with self.late.lock:
            return LateEvent(self, self.done + len(self._queue))

    def wait(self, event: Event) -> None:
        assert isinstance(event, LateEvent) and self.recording is None
        with self.late.lock:
            self._queue.append(event)

    def beside(self) -> LateStream:
        return self.late.stream()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record the steps that `run` enqueues, and return a function that enqueues them again."""
        assert self.can_capture and self.recording is None
        steps = self.recording = list[Step]()
        try:
            with self.active():
                run()
        finally:
            self.recording = None

        def replay() -> None:
            self.late.note("replay", f"{len(steps)} steps", where())
            for step in steps:
                self.enqueue(step)

        return replay

    def enqueue(self, step: Step) -> None:
        if self.recording is not None:
            self.recording.append(step)
            return
        self._append(step)
        self.late.pass_time()

    def freed(self, cell: Cell, home: list[Step] | None) -> None:
        """Enqueue a step that overwrites memory that the program dropped: the stream may allocate it again from there.

        home: the steps of the capture in which the memory was allocated; None if it was allocated outside of a capture
        """

        def spoiled() -> None:
            if cell.values is not None:
                spoil(cell.values)

        if home is None:
            self._append(lambda: spoiled)
        else:
            home.append(lambda: spoiled)

    def ready(self) -> bool:
        """Return whether the next step may be executed now: it is not a wait for an event that has not passed."""
        return bool(self._queue) and (not isinstance(head := self._queue[0], LateEvent) or head.has_passed())

    def execute(self, steps: int | None = None) -> int:
        """Execute up to `steps` steps (None: all), and stop at an event that has not passed; return how many."""
        done = 0
        while done != steps:
            with self.late.lock:
                if not self.ready():
                    break
                step = self._queue.popleft()
                if not isinstance(step, LateEvent):
                    self.late.execute(step)
                self.done += 1
            done += 1
        return done

    def waits_for(self) -> LateEvent | None:
        """Return the event of another stream that this stream is waiting for, or None."""
        head = self._queue[0] if self._queue else None
        return head if isinstance(head, LateEvent) and not head.has_passed() else None

    def _append(self, step: Step) -> None:
        with self.late.lock:
            self._queue.append(step())

    def _check_copy(self, host: Tensor, device: Tensor) -> None:
        assert isinstance(device, LateTensor) and host.is_cpu
        assert (host.shape, host.dtype) == (device.shape, device.dtype)
        assert host.is_contiguous() and device.is_contiguous()
        if not self.late.is_pinned(host):
            self.late.note("pageable", "a copy waits for the device unless its host memory is a host_buffer", where())


def _checksum(host: Tensor) -> int:
    return zlib.crc32(host.contiguous().view(-1).view(torch.uint8).numpy())
