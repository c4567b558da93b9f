"""The folder of --session-dir, held by one server at a time through a lock on a file in it."""

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

NOT_HELD = -1


class HeldFolder:
    """The locked folder. If it, or its lock or logs, are deleted while the server runs, `hold` makes them again.

    Only the user that runs the server can read the subfolder `logs`.
    """

    def __init__(self, path: Path) -> None:
        """Make and lock the folder. Raises OSError, which is BlockingIOError if another server holds it."""
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
        """Whether the locked file is still the one at its path. Raises OSError after `close`."""
        with self._holding:
            return is_at(self._lock, self._lock_path)

    def hold(self) -> None:
        """Make and lock again what was deleted or replaced. Raises OSError, also if another server holds it by now."""
        with self._holding:
            if not is_at(self._lock, self._lock_path):
                # Take the new lock before closing the old one, so that a failure leaves the old one in place.
                old, self._lock = self._lock, self._take()
                os.close(old)
                structlog.get_logger().warning("the folder of sessions was deleted or replaced", folder=str(self._path))
            make(self.logs)

    def _take(self) -> int:
        """Make the folder, lock its lock file, and return the file's descriptor. Raises OSError."""
        import fcntl  # Windows has no fcntl, so --session-dir does not work there.

        make(self._path)
        lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The file may have been deleted or replaced between opening and locking it.
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
    """Return the error for a file that is not at its path any more."""
    return FileNotFoundError(errno.ENOENT, "it was deleted or replaced", str(path))


def is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one at `path`, so that data written to it can be found after a restart."""
    found = os.fstat(descriptor)
    try:
        return os.path.samestat(found, path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False


def make(folder: Path) -> None:
    """Make a folder if it is missing, readable by its owner only, and sync its name to the disk."""
    if not folder.is_dir():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        sync(folder.parent)


def sync(folder: Path) -> None:
    """Sync the names in a folder to the disk."""
    with opened(folder, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        os.fsync(descriptor)


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """Open a file for the duration of the context, and yield its descriptor."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
