"""The folder of --session-dir. A server holds it by locking a file in it, so that no other server can use it."""

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

NOT_HELD = -1


class HeldFolder:
    """The locked folder. If the folder, its lock file or `logs` is deleted while the server runs, `hold` restores it.

    Only the user that runs the server can read the subfolder `logs`.
    """

    def __init__(self, path: Path) -> None:
        """Make and lock the folder. Raises OSError, which is BlockingIOError if another server has locked it."""
        self.logs = path / "sessions"
        self._path, self._lock_path = path, path / "lock"
        self._holding = threading.Lock()
        self._lock = self._take()
        make(self.logs)
        self.logs.chmod(0o700)

    def close(self) -> None:
        """Release the lock."""
        with self._holding:
            os.close(self._lock)
            self._lock = NOT_HELD

    def is_held(self) -> bool:
        """Return whether the lock file was neither deleted nor replaced. Raises OSError after `close`."""
        with self._holding:
            return is_at(self._lock, self._lock_path)

    def hold(self) -> None:
        """Make and lock a deleted or replaced folder again. Raises OSError, also if another server has the lock."""
        with self._holding:
            if not is_at(self._lock, self._lock_path):
                # Take the new lock before closing the old lock, so that a failure keeps the old lock.
                old, self._lock = self._lock, self._take()
                os.close(old)
                structlog.get_logger().warning("the folder of sessions was deleted or replaced", folder=str(self._path))
            make(self.logs)

    def _take(self) -> int:
        """Make the folder, lock its lock file, and return the file's descriptor. Raises OSError."""
        import fcntl  # imported here because Windows has no fcntl; --session-dir does not work there

        make(self._path)
        lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The lock file may have been deleted or replaced between `open` and `flock`.
            if not is_at(lock, self._lock_path):
                raise gone(self._lock_path)
        except BlockingIOError:
            os.close(lock)
            raise BlockingIOError(errno.EWOULDBLOCK, f"{self._path} is in use by another server") from None
        except OSError:
            os.close(lock)
            raise
        return lock


def gone(path: Path) -> FileNotFoundError:
    """Return the error for a file that is no longer at its path."""
    return FileNotFoundError(errno.ENOENT, "it was deleted or replaced", str(path))


def is_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file is still the file at `path`. If not, data written to it is lost after a restart."""
    found = os.fstat(descriptor)
    try:
        return os.path.samestat(found, path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False


def make(folder: Path) -> None:
    """Make a folder if it is missing, for its owner only, and sync its name to the disk."""
    if not folder.is_dir():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        sync(folder.parent)


def sync(folder: Path) -> None:
    """Sync a folder to the disk, so that the names of its files survive a crash."""
    with opened(folder, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        os.fsync(descriptor)


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """Open a file for the duration of the context, and yield its descriptor. A FIFO without a reader is an OSError."""
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
