"""Threads for work that would block the event loop, with a time limit for work that may never end."""

import asyncio
import ctypes
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")

THREAD_ABOVE = 20_000  # characters of input above which work runs in a thread


class OutOfTime(BaseException):
    """The end of work that exceeds its time limit. A BaseException, so that `except Exception` does not catch it."""


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Run `work`, in a thread if it would block the event loop. size: approximate characters of the work's input."""
    return work() if size <= THREAD_ABOVE else await asyncio.to_thread(work)


async def within(seconds: float, work: Callable[[], T]) -> T:
    """Run `work` in a thread. Raises OutOfTime if it takes longer than `seconds`: it is stopped between two bytecodes.

    The limit holds even if the caller is cancelled, so the thread always ends.
    """
    loop, limit = asyncio.get_running_loop(), Limit()

    def run() -> T:
        loop.call_soon_threadsafe(limit.start, loop, seconds)
        return limit.run(work)

    try:
        return await asyncio.to_thread(run)
    finally:
        limit.release()


def limited(seconds: float, work: Callable[[], T]) -> T:
    """Do `work` on this thread, which has no event loop. Raises OutOfTime as `within` does."""
    limit = Limit()
    timer = threading.Timer(seconds, limit.strike)
    timer.daemon = True
    timer.start()
    try:
        return limit.run(work)
    finally:
        timer.cancel()


class OwnThread(Generic[T]):
    """A thread for one piece of work that cannot be interrupted, and the processor time that the work has used."""

    def __init__(self, name: str, work: Callable[[], T], ended: Callable[[], object]) -> None:
        """Start the thread. Raises RuntimeError if the system allows no more threads.

        ended: called on the event loop when the work ends, even if nothing waits for it.
        """
        self._work, self._ended = work, ended
        self._result: Future[T] = Future()
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def ends_within(self, seconds: float) -> bool:
        """Wait at most `seconds` for the end of the work. Return whether it has ended."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._over.wait()
        return self._over.is_set()

    def result(self) -> T:
        """Return the result of work that has ended. Raises what the work raised."""
        return self._result.result()

    def processor_seconds(self) -> float:
        """Return the thread's processor time. Where the system does not report it: the time since its start."""
        try:
            used = Path(f"/proc/self/task/{self._thread.native_id}/schedstat").read_text()
            return int(used.split()[0]) / 1e9
        except (OSError, IndexError, ValueError):
            return time.monotonic() - self._began

    def _run(self) -> None:
        try:
            self._result.set_result(self._work())
        except BaseException as error:
            self._result.set_exception(error)
        with suppress(RuntimeError):  # The event loop may be closed; then nothing waits for the result.
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        self._over.set()
        self._ended()


class Limit:
    """A time limit for work in another thread. The event loop starts the timer; `run` wraps the work."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None  # ident of the thread while the work runs, else None
        self._struck = self._done = False  # whether OutOfTime was raised in the thread; whether the work is over
        self._timer: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        """Start the timer, unless the work is over already. Call this on the event loop."""
        if not self._done:
            self._timer = loop.call_later(seconds, self.strike)

    def run(self, work: Callable[[], T]) -> T:
        """Run the work. Call this on the thread that does the work."""
        self._thread = threading.get_ident()
        try:
            return work()
        finally:
            with self._lock:
                self._thread, self._done = None, True
            if self._struck:
                let_pass()

    def strike(self) -> None:
        """Raise OutOfTime in the work's thread, unless the work is over."""
        with self._lock:
            if self._thread is not None:
                self._struck = True
                raise_in(self._thread, OutOfTime)

    def release(self) -> None:
        """Cancel the timer if the work is over. Call this on the event loop."""
        if self._done and self._timer is not None:
            self._timer.cancel()


def raise_in(thread: int, kind: type[BaseException]) -> None:
    """Raise an exception in another thread, as soon as that thread runs Python bytecode again."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


def let_pass() -> None:
    """Catch an OutOfTime that was requested so late that the work ended before it was raised.

    The interpreter raises OutOfTime at the next backward jump, which is in this loop. If the exception were cancelled
    instead, the interpreter would check for it forever, and CPython 3.11 would loop endlessly once it is profiled.
    """
    with suppress(OutOfTime):
        for _ in range(2):
            pass
