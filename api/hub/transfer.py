"""The transfer of one file: resumed where it was cut, and checked before it gets its name in the cache."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import Self

import httpx2
from huggingface_hub.errors import HfHubHTTPError

from baton.api.hub.connection import PARTIAL_CONTENT, Hub
from baton.api.hub.errors import HubError, explaining
from baton.api.hub.repository import RemoteFile, Repository

ATTEMPTS = 5  # requests in a row that bring no byte, before the transfer is given up
PAUSE_S = 1.0  # before the next request, doubled with each one that brings no byte
BUSY = {429, 500, 502, 503, 504}  # answers after which the request is repeated
NOT_SATISFIABLE = 416
BLOCK = 2**20

Arrived = Callable[[int], None]
"""Called with the number of bytes that have arrived; a negative number if they have to be fetched again."""


class TransferStopped(Exception):
    """The end of a transfer because another one has failed."""


def fetch_file(hub: Hub, repository: Repository, file: RemoteFile, arrived: Arrived, stop: Event) -> None:
    """Fetch a file into the cache, unless it is there. Raises HubError, also if the content is not as the hub states.

    Content that has arrived stays when a transfer is cut or the process is killed; the next one fetches only the rest.
    """
    cache = hub.cache_of(repository.name)
    with explaining(repository.name, hub.endpoint), cache.lock(file):
        if cache.holds(file):
            arrived(file.size)
            return
        with PartialFile(cache.partial(file), file) as partial:
            arrived(partial.size)
            receive(hub, repository, file, partial, arrived, stop)
            partial.check(repository)
        cache.partial(file).replace(cache.blob(file))


def receive(
    hub: Hub, repository: Repository, file: RemoteFile, partial: "PartialFile", arrived: Arrived, stop: Event
) -> None:
    """Request the rest of a file until it is complete. Raises an exception after ATTEMPTS that bring nothing."""
    attempts = 0
    while partial.size < file.size:
        before = partial.size
        failure: Exception | None = None
        try:
            with hub.open(repository, file, before) as response:
                if before and response.status_code != PARTIAL_CONTENT:
                    arrived(-before)
                    partial.restart()
                for chunk in response.iter_raw():
                    if stop.is_set():
                        raise TransferStopped
                    partial.write(chunk)
                    arrived(len(chunk))
                    if partial.size > file.size:
                        break  # More than the hub states; `check` reports it.
        except httpx2.TransportError as error:
            failure = error
        except HfHubHTTPError as error:
            if error.response.status_code == NOT_SATISFIABLE:
                break  # The file ends here, before the size that the hub states; `check` reports it.
            if error.response.status_code not in BUSY:
                raise
            failure = error
        attempts = 0 if partial.size > before else attempts + 1
        if attempts == ATTEMPTS:
            why = str(failure or "the connection ended").splitlines()[0]
            raise HubError(f"{file.name} of {repository.name}: {partial.size:,} of {file.size:,} bytes arrived: {why}")
        if partial.size < file.size and stop.wait(PAUSE_S * 2**attempts):
            raise TransferStopped


class PartialFile:
    """The part of a file that has arrived, and its digest."""

    def __init__(self, path: Path, file: RemoteFile) -> None:
        self._path = path
        self._file = file
        self._opened = path.open("a+b")
        self.size = self._opened.seek(0, 2)
        self._start_digest()
        if self.size > file.size:
            self.restart()
        self._opened.seek(0)
        while block := self._opened.read(BLOCK):
            self._digest.update(block)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._opened.close()

    def restart(self) -> None:
        """Drop what has arrived."""
        self._opened.truncate(0)
        self.size = 0
        self._start_digest()

    def write(self, chunk: bytes) -> None:
        """Append what has arrived. Flush it, so that it stays when the process is killed."""
        self._opened.write(chunk)
        self._opened.flush()
        self._digest.update(chunk)
        self.size += len(chunk)

    def check(self, repository: Repository) -> None:
        """Raise HubError, and delete the content, unless it has the size and the digest that the hub states."""
        file, digest = self._file, self._digest.hexdigest()
        if self.size == file.size and digest == file.digest:
            return
        self._path.unlink()
        kind = "SHA-256" if file.in_lfs else "Git id"
        raise HubError(
            f"{file.name} of {repository.name} is damaged: {self.size:,} bytes with the {kind} {digest} arrived, "
            f"and the hub states {file.size:,} bytes with {file.digest}. They are deleted; try again."
        )

    def _start_digest(self) -> None:
        if self._file.in_lfs:
            self._digest = hashlib.sha256()
        else:
            self._digest = hashlib.sha1(b"blob %d\0" % self._file.size, usedforsecurity=False)
