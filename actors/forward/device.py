"""The seam to the device: what forward asks of it, in stream order, and the thread that carries it out."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

from msgspec import Struct

from actors.requests import Request


class WorkChunk(Struct, frozen=True, array_like=True):
    """Feed the tokens at indices [start, stop) of a row; sample behind the last of them if `samples`."""

    row: int
    start: int
    stop: int
    samples: bool


class WorkCheckpoint(Struct, frozen=True, array_like=True):
    """Copy the state of a row after exactly `position` tokens into `slot`."""

    row: int
    position: int
    slot: int


class Work(Struct, frozen=True, array_like=True):
    """One step: the chunks, and rows that feed the token they sampled last (`decodes`, at `positions`)."""

    step: int
    chunks: list[WorkChunk]
    decodes: list[int]
    positions: list[int]
    checkpoints: list[WorkCheckpoint]


class Device(Protocol):
    """Each call is enqueued on the one stream and returns at once; the order of calls is the order of execution."""

    def clear(self, slot: int) -> None:
        """Zero a state slot."""

    def poison(self, slot: int) -> None:
        """Overwrite a state slot with what no state holds, so that a stale read of it shows."""

    def copy(self, source: int, target: int) -> None:
        """Copy a state slot."""

    def copy_page(self, source: int, target: int) -> None:
        """Copy a KV page, all layers."""

    def export(self, key: int, slot: int, pages: list[int], position: int) -> None:
        """Copy a state slot, and the KV of the first `position` tokens in `pages`, to host memory under `key`."""

    def fill(self, key: int, slot: int, pages: list[int], first_page: int) -> None:
        """Fill a state slot from host memory, and `pages`, those of page index `first_page` and on, with its KV."""

    def drop(self, key: int) -> None:
        """Forget a copy in host memory."""

    def drop_all(self) -> None:
        """Forget every copy in host memory."""

    def open_row(self, row: int, grant: int, slot: int, request: Request, pages: list[int]) -> None:
        """Set a row up: its tokens, sampling parameters, state slot and pages."""

    def extend_row(self, row: int, pages: list[int]) -> None:
        """Append pages to a row's table."""

    def run(self, work: Work) -> None:
        """Run a step; its Ran is delivered to forward's mailbox when it is done."""


class DeviceThread:
    """A Device that has the calls of another carried out, in order, on a thread of its own.

    A call that raises ends the thread: `failed` is called from it with the error, and later calls do nothing.
    """

    def __init__(self, device: Device, failed: Callable[[BaseException], None]) -> None:
        self._device = device
        self._failed = failed
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="device", daemon=True)
        self._thread.start()

    def clear(self, slot: int) -> None:
        self._calls.put(lambda: self._device.clear(slot))

    def poison(self, slot: int) -> None:
        self._calls.put(lambda: self._device.poison(slot))

    def copy(self, source: int, target: int) -> None:
        self._calls.put(lambda: self._device.copy(source, target))

    def copy_page(self, source: int, target: int) -> None:
        self._calls.put(lambda: self._device.copy_page(source, target))

    def export(self, key: int, slot: int, pages: list[int], position: int) -> None:
        self._calls.put(lambda: self._device.export(key, slot, pages, position))

    def fill(self, key: int, slot: int, pages: list[int], first_page: int) -> None:
        self._calls.put(lambda: self._device.fill(key, slot, pages, first_page))

    def drop(self, key: int) -> None:
        self._calls.put(lambda: self._device.drop(key))

    def drop_all(self) -> None:
        self._calls.put(self._device.drop_all)

    def open_row(self, row: int, grant: int, slot: int, request: Request, pages: list[int]) -> None:
        self._calls.put(lambda: self._device.open_row(row, grant, slot, request, pages))

    def extend_row(self, row: int, pages: list[int]) -> None:
        self._calls.put(lambda: self._device.extend_row(row, pages))

    def run(self, work: Work) -> None:
        self._calls.put(lambda: self._device.run(work))

    def close(self) -> None:
        """Finish what is enqueued, then end the thread."""
        self._calls.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except BaseException as error:
                self._failed(error)
                return
