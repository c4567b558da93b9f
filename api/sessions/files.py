"""The log files of sessions under --session-dir, one per session. All calls block, so threads must call them.

A call that writes returns when the data is on the disk and the file has its final name. A complete file is written
under a temporary name in the same folder, and then renamed.
"""

import os
import stat
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
    """The contents of a session's file."""

    key: str
    records: list[LogRecord]
    age: float  # seconds since the last write to the file
    size: int  # size of the file in bytes


class SessionFiles:
    """The folder of all session files, locked by one server at a time.

    Calls for one key must not overlap; calls for different keys may.
    """

    def __init__(self, path: Path) -> None:
        """Lock the folder. Raises ConfigError if it cannot be used, or if another server has locked it."""
        try:
            self._folder = HeldFolder(path)
        except BlockingIOError as error:
            raise ConfigError(f"--session-dir: {error.strerror}") from None
        except OSError as error:
            raise ConfigError(f"--session-dir: {error}") from None

    def close(self) -> None:
        """Unlock the folder, so that another server can use it."""
        self._folder.close()

    def read_all(self) -> Iterator[StoredLog]:
        """Yield the log of every session. Rename unreadable files to *.damaged, and cut off incomplete last records."""
        # A server that is killed in `replace` leaves a temporary file; the file to be replaced is still intact.
        for path in self._folder.logs.glob("*.tmp"):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                structlog.get_logger().warning("a temporary file is not deleted", file=str(path), error=str(error))
        for path in sorted(self._folder.logs.glob("*.log")):
            try:
                yield self._read(path)
            except (DamagedLogError, OSError) as error:
                self.set_aside(path.stem, str(error))

    def sizes(self) -> dict[str, int]:
        """Return the size of each existing log in bytes, by key. Raises OSError."""
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
        """Append records to a file and return their size in bytes. size: expected size of the file before.

        Raises OSError, after which the whole file must be written again. The error is FileNotFoundError if the file has
        another size, or was deleted or replaced.
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
        """Replace the file and return its new size. Raises OSError, after which the old file is unchanged or gone."""
        data, path = encode(records), self._path(key)
        temporary = path.with_suffix(".tmp")
        self._folder.hold()
        try:
            with opened(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as descriptor:
                write(descriptor, data)
                temporary.replace(path)
                sync(self._folder.logs)
                self._check_there(descriptor, path)
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        return len(data)

    def delete(self, key: str) -> None:
        """Delete the file of a session, if it exists. Raises OSError."""
        self._folder.hold()
        self._path(key).unlink(missing_ok=True)
        sync(self._folder.logs)

    def set_aside(self, key: str, why: str) -> None:
        """Rename an unusable file to *.damaged, and log why."""
        path = self._path(key)
        aside = path.with_suffix(".damaged")
        structlog.get_logger().error("a session's file is set aside", file=str(aside), error=why)
        with suppress(OSError):
            path.replace(aside)

    def _read(self, path: Path) -> StoredLog:
        """Read one file, and cut off an incomplete last record. Raises DamagedLogError or OSError."""
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise DamagedLogError("it is no regular file")  # reading a FIFO would wait for a writer
        data, age = path.read_bytes(), max(0.0, time.time() - found.st_mtime)
        records, end = decode(data)
        if end < len(data):
            structlog.get_logger().warning("a torn record is cut off", file=str(path), bytes=len(data) - end)
            os.truncate(path, end)
        return StoredLog(path.stem, records, age, end)

    def _path(self, key: str) -> Path:
        return self._folder.logs / f"{key}.log"

    def _check_there(self, descriptor: int, path: Path) -> None:
        """Raise FileNotFoundError unless the written file is still at `path`, and its folder is still locked."""
        if not (is_at(descriptor, path) and self._folder.is_held()):
            raise gone(path)


def write(descriptor: int, data: bytes) -> None:
    """Write all of `data` and sync it to the disk."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    os.fsync(descriptor)
