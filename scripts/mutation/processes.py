"""One process for each job, because a job may break its process. Processes are forked after slow imports."""

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
MEMORY = 4 << 30  # bytes that a job may allocate

Notify = Callable[[str], None]


@dataclass(slots=True)
class Running(Generic[W]):
    """A job and its process."""

    work: W
    tree: Path  # the copy of the checkout that the job uses
    process: BaseProcess
    at: str = ""  # the job's last report of its progress
    failed: str = "the process ends without a result"  # why the job failed; empty: `value` is the job's result
    value: Any = None


def run_each(works: Iterable[W], trees: list[Path], do: Callable[[Path, W, Notify], Any]) -> Iterator[Running[W]]:
    """Call `do` for each job in its own process, with a copy of the checkout that no other running job uses.

    Yields the jobs as they end.
    """
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
            if not _receive(ready, running[ready]):
                done = running.pop(ready)
                free.append(done.tree)
                yield done


def _fork(tree: Path, work: W, do: Callable[[Path, W, Notify], Any]) -> tuple[Connection, BaseProcess]:
    context = get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, tree, work, do), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def _child(connection: Connection, tree: Path, work: W, do: Callable[[Path, W, Notify], Any]) -> None:
    """Do a job, then exit without waiting for threads: threads of broken code may never end."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    try:
        connection.send(("done", do(tree, work, lambda text: connection.send(("at", text)))))
    except BaseException as error:
        connection.send(("failed", f"{type(error).__name__}: {error}".splitlines()[0]))
    os._exit(0)


def _receive(connection: Connection, running: Running[Any]) -> bool:
    """Receive a report of a job's process, and store it in `running`. Return False if the process has ended."""
    try:
        kind, content = connection.recv()
    except EOFError:
        running.process.join()
        if running.process.exitcode == -signal.SIGALRM:
            running.failed = "the check takes too long"
        elif running.process.exitcode:
            running.failed = f"the process ends with {running.process.exitcode}"
        connection.close()
        return False
    if kind == "at":
        running.at = content
    elif kind == "failed":
        running.failed = content
    else:
        running.failed, running.value = "", content
    return True
