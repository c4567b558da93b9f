"""The folder of --session-dir: a file for each session's log, and a lock. None of these calls is for the event loop.

What is appended is on the disk when the call returns. A whole file is written beside its place and then moved there.
"""

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from api.config import ConfigError
from api.sessions.records import DamagedLogError, LogRecord, decode, encode


@dataclass(frozen=True)
class StoredLog:
    """A session's records as they were found. age: seconds since the last was written; size: bytes of the file."""

    key: str
    records: list[LogRecord]
    age: float
    size: int


class SessionFiles:
    """Held by one server at a time. Calls for one key must not overlap; those for different ones may."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError if the folder cannot be used, or another server has it."""
        import fcntl  # Windows has none, and serves without a folder.

        self._logs = folder / "sessions"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._logs.mkdir(mode=0o700, exist_ok=True)
            self._logs.chmod(0o700)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"--session-dir: {error}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise ConfigError(f"--session-dir: {folder} is in use by another server") from None

    def close(self) -> None:
        """Let another server have the folder."""
        os.close(self._lock)

    def read_all(self) -> Iterator[StoredLog]:
        """Every session. A file that cannot be read is set aside, and the rest of a torn record cut off."""
        for path in self._logs.glob("*.tmp"):
            path.unlink()
        for path in sorted(self._logs.glob("*.log")):
            try:
                yield self._read(path)
            except (DamagedLogError, OSError) as error:
                self.set_aside(path.stem, str(error))

    def append(self, key: str, records: Iterable[LogRecord]) -> int:
        """Returns how many bytes were added. Raises OSError: the file is to be written anew."""
        data = encode(records)
        descriptor = os.open(self._path(key), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            write(descriptor, data)
        finally:
            os.close(descriptor)
        return len(data)

    def replace(self, key: str, records: Iterable[LogRecord]) -> int:
        """Write the whole file. Returns its size. Raises OSError: the file is as it was, or is not there."""
        data, path = encode(records), self._path(key)
        beside = path.with_suffix(".tmp")
        try:
            descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                write(descriptor, data)
            finally:
                os.close(descriptor)
            beside.replace(path)
        except OSError:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
            raise
        self._sync_folder()
        return len(data)

    def delete(self, key: str) -> None:
        """Raises OSError."""
        self._path(key).unlink(missing_ok=True)
        self._sync_folder()

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
        return self._logs / f"{key}.log"

    def _sync_folder(self) -> None:
        descriptor = os.open(self._logs, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write(descriptor: int, data: bytes) -> None:
    """All of `data`, on the disk when it returns."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    os.fsync(descriptor)
