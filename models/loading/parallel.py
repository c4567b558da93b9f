"""Work in several daemon threads, which do not keep the process alive."""

from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_threads(work: Callable[[Item], Result], items: Sequence[Item], count: int) -> Iterator[Result]:
    """Yield work(item) for each item, in the order of completion.

    Raises the first error of a thread, once the items that are in progress are done; no further items are begun.
    """
    todo, done, stop = SimpleQueue[Item](), SimpleQueue[Result | BaseException](), Event()
    for item in items:
        todo.put(item)

    def run() -> None:
        while not stop.is_set():
            try:
                item = todo.get_nowait()
            except Empty:
                return
            try:
                done.put(work(item))
            except BaseException as error:
                done.put(error)

    threads = [Thread(target=run, name="baton-loading", daemon=True) for _ in range(min(count, len(items)))]
    for thread in threads:
        thread.start()
    try:
        for _ in items:
            result = done.get()
            if isinstance(result, BaseException):
                raise result
            yield result
    finally:
        stop.set()
        for thread in threads:
            thread.join()
