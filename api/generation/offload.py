"""Work that would keep the event loop waiting: done in threads, and with a limit of time where it may never end."""

import asyncio
import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

THREAD_ABOVE = 20_000


class OutOfTime(BaseException):
    """The work was ended at its limit. No `except Exception` in it may hold this up."""


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Run `work` in a thread if `size`, about the characters of its input, would keep the event loop waiting."""
    return work() if size <= THREAD_ABOVE else await asyncio.to_thread(work)


async def within(seconds: float, work: Callable[[], T]) -> T:
    """Run `work` in a thread. Raises OutOfTime if it takes longer; it is ended between two steps of the interpreter."""
    return await asyncio.to_thread(limited, seconds, work)


def limited(seconds: float, work: Callable[[], T]) -> T:
    """Run `work` in this thread, which gets an OutOfTime when the time is up."""
    thread, lock = threading.get_ident(), threading.Lock()
    running, struck = True, False

    def strike() -> None:
        nonlocal struck
        with lock:
            if running:
                struck = True
                raise_in(thread, OutOfTime)

    timer = threading.Timer(seconds, strike)
    timer.daemon = True
    timer.start()
    try:
        return work()
    finally:
        with lock:
            running = False
        timer.cancel()
        if struck:
            raise_in(thread, None)  # It may have struck too late to be noticed by the work.


def raise_in(thread: int, kind: type[BaseException] | None) -> None:
    """Have a thread raise this as soon as it runs Python again; None takes back what it has not raised yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind) if kind else None)
