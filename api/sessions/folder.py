"""The folder of --session-dir, held by one server at a time: by a lock on a file in it, which goes with the folder."""

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

NOT_HELD = -1


class HeldFolder:
    """Its `logs` are for its owner alone. What is deleted or replaced meanwhile is made anew, the lock first."""

    def __init__(self, path: Path) -> None:
        """Raises OSError: BlockingIOError if another server has it."""
        self.logs = path / "sessions"
        self._path, self._lock_path = path, path / "lock"
        self._holding = threading.Lock()
        self._lock = self._take()
        make(self.logs)
        self.logs.chmod(0o700)

    def close(self) -> None:
        """Let another server have it."""
        with self._holding:
            os.close(self._lock)
            self._lock = NOT_HELD

    def is_held(self) -> bool:
        """Whether what is at its path now is what was locked. Raises OSError after `close`."""
        with self._holding:
            return is_at(self._lock, self._lock_path)

    def hold(self) -> None:
        """Make anew what is gone. Raises OSError, as for a folder that another server has taken since."""
        with self._holding:
            if not is_at(self._lock, self._lock_path):
                old, self._lock = self._lock, self._take()
                os.close(old)
                structlog.get_logger().warning("the folder of sessions was deleted or replaced", folder=str(self._path))
            make(self.logs)

    def _take(self) -> int:
        import fcntl  # Windows has none, and serves without a folder.

        make(self._path)
        lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
    return FileNotFoundError(errno.ENOENT, "it was deleted or replaced", str(path))


def is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file still bears its name: what is written to it is there after a restart."""
    found = os.fstat(descriptor)
    try:
        return os.path.samestat(found, path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False


def make(folder: Path) -> None:
    """If it is not there, for its owner alone, and its name on the disk."""
    if not folder.is_dir():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        sync(folder.parent)


def sync(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    with opened(folder, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        os.fsync(descriptor)


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
