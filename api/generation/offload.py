"""Work that would keep the event loop waiting: done in threads, and with a limit of time where it may never end."""

import asyncio
import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

THREAD_ABOVE = 20_000


class OutOfTime(BaseException):
    """The work was ended at its limit. No `except Exception` in it may hold this up."""


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Run `work` in a thread if `size`, about the characters of its input, would keep the event loop waiting."""
    return work() if size <= THREAD_ABOVE else await asyncio.to_thread(work)


async def within(seconds: float, work: Callable[[], T]) -> T:
    """Run `work` in a thread. Raises OutOfTime if it takes longer; it is ended between two steps of the interpreter.

    That holds also if nobody waits for it any more.
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
    """Ends the work of another thread when its time is up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._struck = self._done = False
        self._timer: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        """From the event loop: the time begins."""
        if not self._done:
            self._timer = loop.call_later(seconds, self.strike)

    def run(self, work: Callable[[], T]) -> T:
        """From the thread that works."""
        self._thread = threading.get_ident()
        try:
            return work()
        finally:
            with self._lock:
                self._thread, self._done = None, True
            if self._struck:
                let_pass()

    def strike(self) -> None:
        with self._lock:
            if self._thread is not None:
                self._struck = True
                raise_in(self._thread, OutOfTime)

    def release(self) -> None:
        """From the event loop: what is done needs no timer."""
        if self._done and self._timer is not None:
            self._timer.cancel()


def raise_in(thread: int, kind: type[BaseException]) -> None:
    """Have a thread raise this as soon as it runs Python again."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


def let_pass() -> None:
    """What struck too late to be noticed by the work arrives at a jump back, here.

    Taken back instead it would leave the interpreter looking for it for ever, and CPython 3.11 in an endless loop as
    soon as it is profiled.
    """
    with suppress(OutOfTime):
        for _ in range(2):
            pass
