"""The signals that end the server, from the first import to the last write. Importing this module is quick."""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

ENDING = ("SIGTERM", "SIGINT", "SIGHUP")  # Windows lacks the last one


class Signals:
    """The signals that end the process. Until `deliver_to` is called, each ends it at once, with exit code 0."""

    def __init__(self) -> None:
        self._receive: Callable[[int], None] = lambda number: leave(0)

    def take(self) -> None:
        """Handle the signals from now on, instead of Python and asyncio. Call this in the main thread."""
        for name in ENDING:
            number = getattr(signal, name, None)
            # nohup ignores SIGHUP, so that the process outlives the terminal.
            if number is None or (name == "SIGHUP" and signal.getsignal(number) is signal.SIG_IGN):
                continue
            signal.signal(number, lambda number, frame: self._receive(number))

    def deliver_to(self, receive: Callable[[int], None]) -> None:
        """Let later signals call `receive` with their numbers, in the main thread, between any two instructions."""
        self._receive = receive

    def deliver_on(self, loop: "AbstractEventLoop", receive: Callable[[], object]) -> None:
        """Let later signals call `receive` on an event loop. After the end of the loop they do nothing."""

        def deliver(number: int) -> None:
            with suppress(RuntimeError):  # The loop is closed: the process is ending already.
                loop.call_soon_threadsafe(receive)

        self.deliver_to(deliver)


def leave(code: int) -> NoReturn:
    """End the process at once. Threads that still run C++ would abort it during a regular end of the interpreter."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)
