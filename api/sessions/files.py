"""A file for each session's log, in the folder of --session-dir. None of these calls is for the event loop.

What is appended is on the disk, and under its name, when the call returns. A whole file is written beside its place and
then moved there.
"""

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from baton.api.config import ConfigError
from baton.api.sessions.folder import HeldFolder, gone, is_at, opened, sync
from baton.api.sessions.records import DamagedLogError, LogRecord, decode, encode


@dataclass(frozen=True)
class StoredLog:
    """A session's records as they were found. age: seconds since the last was written; size: bytes of the file."""

    key: str
    records: list[LogRecord]
    age: float
    size: int


class SessionFiles:
    """Held by one server at a time. Calls for one key must not overlap; those for different ones may."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the folder cannot be used, or another server has it."""
        try:
            self._folder = HeldFolder(path)
        except BlockingIOError as error:
            raise ConfigError(f"--session-dir: {error.strerror}") from None
        except OSError as error:
            raise ConfigError(f"--session-dir: {error}") from None

    def close(self) -> None:
        """Let another server have the folder."""
        self._folder.close()

    def read_all(self) -> Iterator[StoredLog]:
        """Every session. A file that cannot be read is set aside, and the rest of a torn record cut off."""
        for path in self._folder.logs.glob("*.tmp"):
            path.unlink(missing_ok=True)
        for path in sorted(self._folder.logs.glob("*.log")):
            try:
                yield self._read(path)
            except (DamagedLogError, OSError) as error:
                self.set_aside(path.stem, str(error))

    def sizes(self) -> dict[str, int]:
        """The bytes of each log that is there, by key. Raises OSError."""
        self._folder.hold()
        found = {}
        with os.scandir(self._folder.logs) as entries:
            for entry in entries:
                key, suffix = os.path.splitext(entry.name)
                with suppress(FileNotFoundError):
                    if suffix == ".log":
                        found[key] = entry.stat().st_size
        return found

    def append(self, key: str, records: Iterable[LogRecord], size: int) -> int:
        """size: bytes that it was left with. Returns how many were added.

        Raises OSError: the file is to be written anew; FileNotFoundError if it was deleted or replaced meanwhile.
        """
        data, path = encode(records), self._path(key)
        self._folder.hold()
        with opened(path, os.O_WRONLY | os.O_APPEND) as descriptor:
            if os.fstat(descriptor).st_size != size:
                raise gone(path)
            write(descriptor, data)
            self._check_there(descriptor, path)
        return len(data)

    def replace(self, key: str, records: Iterable[LogRecord]) -> int:
        """Write the whole file. Returns its size. Raises OSError: the file is as it was, or is not there."""
        data, path = encode(records), self._path(key)
        beside = path.with_suffix(".tmp")
        self._folder.hold()
        try:
            with opened(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as descriptor:
                write(descriptor, data)
                beside.replace(path)
                sync(self._folder.logs)
                self._check_there(descriptor, path)
        except OSError:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
            raise
        return len(data)

    def delete(self, key: str) -> None:
        """Raises OSError."""
        self._folder.hold()
        self._path(key).unlink(missing_ok=True)
        sync(self._folder.logs)

    def set_aside(self, key: str, why: str) -> None:
        path = self._path(key)
        aside = path.with_suffix(".damaged")
        structlog.get_logger().error("a session's file is set aside", file=str(aside), error=why)
        with suppress(OSError):
            path.replace(aside)

    def _read(self, path: Path) -> StoredLog:
        data, age = path.read_bytes(), max(0.0, time.time() - path.stat().st_mtime)
        records, end = decode(data)
        if end < len(data):
            structlog.get_logger().warning("a torn record is cut off", file=str(path), bytes=len(data) - end)
            os.truncate(path, end)
        return StoredLog(path.stem, records, age, end)

    def _path(self, key: str) -> Path:
        return self._folder.logs / f"{key}.log"

    def _check_there(self, descriptor: int, path: Path) -> None:
        """What was written counts only under its name, in a folder that is held."""
        if not (is_at(descriptor, path) and self._folder.is_held()):
            raise gone(path)


def write(descriptor: int, data: bytes) -> None:
    """All of `data`, on the disk when it returns."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    os.fsync(descriptor)
