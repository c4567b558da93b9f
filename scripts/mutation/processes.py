"""A process for each piece of work, forked from one that has loaded what is slow to load; it may break."""

import os
import resource
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Generic, TypeVar

W = TypeVar("W")
MEMORY = 4 << 30

Tell = Callable[[str], None]


@dataclass(slots=True)
class Running(Generic[W]):
    """at: what it said last. failed: why it did not come to its end, else `value` is its result."""

    work: W
    tree: Path
    process: BaseProcess
    at: str = ""
    failed: str = "it ended without a word"
    value: Any = None


def run_each(works: Iterable[W], trees: list[Path], do: Callable[[Path, W, Tell], Any]) -> Iterator[Running[W]]:
    """`do` each piece of work in a process of its own, in a tree that is free."""
    pending, free = iter(works), list(trees)
    running: dict[Connection, Running[W]] = {}
    while True:
        while free and (work := next(pending, None)) is not None:
            tree = free.pop()
            connection, process = _fork(tree, work, do)
            running[connection] = Running(work, tree, process)
        if not running:
            return
        for ready in wait(list(running)):
            assert isinstance(ready, Connection)
            if not _hear(ready, running[ready]):
                done = running.pop(ready)
                free.append(done.tree)
                yield done


def _fork(tree: Path, work: W, do: Callable[[Path, W, Tell], Any]) -> tuple[Connection, BaseProcess]:
    context = get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, tree, work, do), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def _child(connection: Connection, tree: Path, work: W, do: Callable[[Path, W, Tell], Any]) -> None:
    """Without an orderly end: a thread of what is broken may never come to its own."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    try:
        connection.send(("done", do(tree, work, lambda text: connection.send(("at", text)))))
    except BaseException as error:
        connection.send(("failed", f"{type(error).__name__}: {error}".splitlines()[0]))
    os._exit(0)


def _hear(connection: Connection, running: Running[Any]) -> bool:
    """False when the process is gone."""
    try:
        kind, said = connection.recv()
    except EOFError:
        running.process.join()
        if running.process.exitcode == -signal.SIGALRM:
            running.failed = "it takes too long"
        elif running.process.exitcode:
            running.failed = f"the process ends with {running.process.exitcode}"
        connection.close()
        return False
    if kind == "at":
        running.at = said
    elif kind == "failed":
        running.failed = said
    else:
        running.failed, running.value = "", said
    return True
