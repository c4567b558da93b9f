"""Threads for work that would block the event loop, with a time limit for work that may never end."""

import asyncio
import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

THREAD_ABOVE = 20_000  # characters of input; work on more goes to a thread


class OutOfTime(BaseException):
    """Raised inside work that reached its time limit. A BaseException, so that `except Exception` does not stop it."""


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Run `work`, in a thread if it would block the event loop. size: about the characters of its input."""
    return work() if size <= THREAD_ABOVE else await asyncio.to_thread(work)


async def within(seconds: float, work: Callable[[], T]) -> T:
    """Run `work` in a thread. Raises OutOfTime if it takes longer: it is ended between two bytecodes.

    The limit applies even if the caller is cancelled.
    """
    loop, limit = asyncio.get_running_loop(), Limit()

    def run() -> T:
        loop.call_soon_threadsafe(limit.start, loop, seconds)
        return limit.run(work)

    try:
        return await asyncio.to_thread(run)
    finally:
        limit.release()


class Limit:
    """A time limit on work in another thread. The event loop starts it, `run` wraps the work."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None  # the thread's ident while it works
        self._struck = self._done = False  # OutOfTime was raised in the thread; the work is over
        self._timer: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        """Start the timer. Called on the event loop."""
        if not self._done:
            self._timer = loop.call_later(seconds, self.strike)

    def run(self, work: Callable[[], T]) -> T:
        """Run the work. Called on the thread that it is done in."""
        self._thread = threading.get_ident()
        try:
            return work()
        finally:
            with self._lock:
                self._thread, self._done = None, True
            if self._struck:
                let_pass()

    def strike(self) -> None:
        """Raise OutOfTime in the thread, unless the work is over."""
        with self._lock:
            if self._thread is not None:
                self._struck = True
                raise_in(self._thread, OutOfTime)

    def release(self) -> None:
        """Cancel the timer if the work is done. Called on the event loop."""
        if self._done and self._timer is not None:
            self._timer.cancel()


def raise_in(thread: int, kind: type[BaseException]) -> None:
    """Have a thread raise an exception as soon as it runs Python bytecode again."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


def let_pass() -> None:
    """Catch an OutOfTime that was set too late to be raised inside the work.

    The interpreter raises it at the next backward jump, which is in this loop. Cancelling it instead would leave the
    interpreter checking for it for ever, and CPython 3.11 in an endless loop as soon as it is profiled.
    """
    with suppress(OutOfTime):
        for _ in range(2):
            pass
