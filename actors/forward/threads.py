"""The device's threads: one enqueues and waits for nothing but late masks, one waits for steps, one for copies."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeAlias

from baton.actors.forward.device import Work, WorkMask
from baton.actors.forward.launching import Device, Pending
from baton.actors.messages import Ran, Transferred
from baton.actors.requests import Request

Deliver: TypeAlias = Callable[[Ran | Transferred], None]


@dataclass(frozen=True, slots=True)
class Extension:
    """Pages that a row gets, before the step that fills them."""

    row: int
    pages: list[int]


Call: TypeAlias = Callable[[], None] | Extension | Work


class DeviceThread:
    """A DeviceQueue that makes the calls of a Device in order on a thread of its own.

    deliver: called with each result, from any of the threads. Steps are delivered in order and copies are delivered
    in order, but a step does not wait for a copy.
    failed: called with the error if a call or a collect raises. That ends everything: later calls do nothing.
    """

    def __init__(self, device: Device, deliver: Deliver, failed: Callable[[BaseException], None]) -> None:
        self._device = device
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._failed = failed
        self._late: Future[list[WorkMask]] | None = None  # Work.late of the newest step that has it
        enter = device.enter_thread
        self._steps, self._copies = Waiter("steps", enter, deliver, failed), Waiter("copies", enter, deliver, failed)
        self._thread = threading.Thread(target=self._work, name="device", daemon=True)
        self._thread.start()

    @property
    def copies_aside(self) -> bool:
        return self._device.copies_aside

    def clear(self, slot: int) -> None:
        self._calls.put(lambda: self._device.clear(slot))

    def poison(self, slot: int) -> None:
        self._calls.put(lambda: self._device.poison(slot))

    def copy(self, source: int, target: int) -> None:
        self._calls.put(lambda: self._device.copy(source, target))

    def copy_page(self, source: int, target: int) -> None:
        self._calls.put(lambda: self._device.copy_page(source, target))

    def export(self, key: int, slot: int, pages: list[int], position: int) -> None:
        self._calls.put(lambda: self._copies.take(self._device.export(key, slot, pages, position)))

    def fill(self, grant: int, key: int, slot: int, pages: list[int], first_page: int) -> None:
        self._calls.put(lambda: self._copies.take(self._device.fill(grant, key, slot, pages, first_page)))

    def drop(self, key: int) -> None:
        self._calls.put(lambda: self._device.drop(key))

    def drop_all(self) -> None:
        self._calls.put(self._device.drop_all)

    def open_row(self, row: int, grant: int, slot: int, request: Request, pages: list[int]) -> None:
        self._calls.put(lambda: self._device.open_row(row, grant, slot, request, pages))

    def extend_row(self, row: int, pages: list[int]) -> None:
        self._calls.put(Extension(row, pages))

    def run(self, work: Work) -> None:
        self._late = work.late or self._late
        self._calls.put(work)

    def close(self) -> None:
        """Finish everything that is enqueued, then end the threads. Do not wait for late masks that have not come."""
        if self._late is not None and not self._late.done():
            self._late.set_result([])
        self._calls.put(None)
        self._thread.join()
        self._steps.close()
        self._copies.close()

    def _work(self) -> None:
        try:
            self._device.enter_thread()
            while (call := self._next()) is not None and not (self._steps.has_failed or self._copies.has_failed):
                match call:
                    case Work():
                        self._launch(call)
                    case Extension(row, pages):  # Keep the held result: the step that follows is prepared before.
                        self._device.extend_row(row, pages)
                    case _:
                        self._deliver()
                        call()
            self._deliver()
        except BaseException as error:
            self._deliver()
            self._failed(error)

    def _next(self) -> Call | None:
        if self._calls.empty():
            self._deliver()
        return self._calls.get()

    def _launch(self, work: Work) -> None:
        """Launch a step. If a result is held, prepare the step before the delivery, and launch it after.

        Preparing needs the interpreter's lock, for which it would compete with the actors that a delivery wakes. A CPU
        would be idle in that time.
        """
        try:
            if self._steps.holds:
                self._device.prepare(work)
        finally:
            self._deliver()
        self._steps.take(self._device.launch(work))

    def _deliver(self) -> None:
        self._copies.deliver()
        self._steps.deliver()


class Waiter:
    """A thread that waits for Pendings and delivers their results in order.

    The thread starts with the first Pending that is not over when `take` gets it. On a CPU every Pending is over at
    once, so the thread never starts, and `deliver` delivers the results.

    what: the part of the thread's name after `device-`.
    enter: called first on the thread.
    """

    def __init__(
        self, what: str, enter: Callable[[], None], deliver: Deliver, failed: Callable[[BaseException], None]
    ) -> None:
        self.has_failed = False
        self._enter = enter
        self._deliver = deliver
        self._failed = failed
        self._taken = self._delivered = 0  # each written by one thread only
        self._held: Ran | Transferred | None = None  # a result that `deliver` delivers
        self._pending: SimpleQueue[Pending[Ran | Transferred] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"device-{what}", daemon=True)

    def take(self, pending: Pending[Ran | Transferred]) -> None:
        """Take a Pending, whose result is delivered by `deliver` if it is over, else by the thread when it is.

        Call this and `deliver` from one thread only, `deliver` before the next `take`. Raises the error of a Pending
        that is over already.
        """
        # If an earlier Pending is still waited for, delivering this one now would change the order.
        if self._taken == self._delivered and pending.passed():
            self._held = pending.collect().report
            return
        if not self._thread.is_alive():
            self._thread.start()
        self._taken += 1
        self._pending.put(pending)

    @property
    def holds(self) -> bool:
        """Whether `deliver` has a result to deliver."""
        return self._held is not None

    def deliver(self) -> None:
        """Deliver the result of the Pending that was over when it was taken, if there is one."""
        held, self._held = self._held, None
        if held is not None:
            self._deliver(held)

    def close(self) -> None:
        """Deliver everything that was taken, then end the thread."""
        if self._thread.is_alive():
            self._pending.put(None)
            self._thread.join()

    def _work(self) -> None:
        try:
            self._enter()
            while (pending := self._pending.get()) is not None:
                self._deliver(pending.collect().report)
                del pending  # A copy's host memory is free when its last reference is gone: keep none while waiting.
                self._delivered += 1
        except BaseException as error:
            self.has_failed = True
            self._failed(error)
