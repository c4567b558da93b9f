"""`baton pull`: fetch a model from the hub. This module does not import torch, so that the command is quick."""

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from baton.api.hub.checkpoint import Check, find
from baton.api.hub.connection import Hub
from baton.api.hub.download import Progress
from baton.api.hub.errors import HubError
from baton.api.hub.names import HubName, hub_name
from baton.api.machine.signals import leave
from baton.api.telemetry import logs
from baton.api.terminal.console import complain
from baton.api.terminal.progress import ProgressBar

INTERRUPTED = 130  # exit code after Ctrl-C, as in a shell
LOGGED_EVERY_S = 10.0


def pull(model: str) -> int:
    """Fetch a model and print its folder. Return the exit code."""
    logs.configure("auto", "info")
    try:
        name = hub_name(model)
        if name is None:
            raise HubError(f"{model} is not a name on the hub, as ORG/NAME or ORG/NAME@REVISION")
        with leaving_at_once():
            folder = fetch(name)
        print(folder)
    except HubError as error:
        complain(error)
        return 1
    return 0


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """End the process at once on Ctrl-C. Transfers may wait for the hub, and what has arrived is on the disk."""
    before = signal.signal(signal.SIGINT, lambda number, frame: leave(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def fetch(name: HubName, check: Check | None = None) -> Path:
    """Fetch a model and return its folder, see HubCheckpoint.fetch. Raises HubError."""
    found = find(Hub(), name)
    if isinstance(found, Path):
        return found
    with downloading(name) as on_progress:
        return found.fetch(on_progress, check)


@contextmanager
def downloading(name: HubName) -> Iterator[Progress]:
    """Show the progress of a download: a bar on a terminal, otherwise a line in the log every LOGGED_EVERY_S."""
    bar, log = ProgressBar("downloading"), structlog.get_logger()
    logged = -math.inf

    def update(done: int, total: int) -> None:
        nonlocal logged
        bar.update(done, total)
        if not bar.is_shown and (done == total or time.monotonic() - logged > LOGGED_EVERY_S):
            logged = time.monotonic()
            log.info("downloading", model=str(name), done=done, total=total)

    try:
        yield update
    finally:
        bar.close()
