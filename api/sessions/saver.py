"""Brings a session's log to its file in the background, and says when it is there."""

import asyncio
import errno
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import structlog

from baton.api.errors import DO_NOT_RETRY, ApiError
from baton.api.sessions.files import SessionFiles
from baton.api.sessions.records import LogRecord

MAX_THREADS = 16
NOT_SAVED = "session_not_saved"
T = TypeVar("T")


class SessionDisk:
    """The files of all sessions, called in at most MAX_THREADS threads at once. used: bytes of all logs; used_by: of
    each owner's.

    on_full: called when `used` grows beyond `cap`, in bytes.
    """

    def __init__(self, files: SessionFiles, cap: int, on_full: Callable[[], None]) -> None:
        self.files = files
        self.used = 0
        self.used_by: Counter[bytes] = Counter()
        self.cap = cap
        self.closed = False
        self._on_full = on_full
        self._limiter = anyio.CapacityLimiter(MAX_THREADS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._undeleted: set[str] = set()

    async def run(self, work: Callable[[], T]) -> T:
        """In a thread."""
        return await anyio.to_thread.run_sync(work, limiter=self._limiter)

    def start(self, saving: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(saving)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """When all that was begun is done, let another server have the files."""
        self.closed = True
        while self._tasks:
            await asyncio.wait(self._tasks)
        self.files.close()

    async def delete(self, key: str) -> None:
        """Raises OSError; it is then left to `delete_again`."""
        self._undeleted.add(key)
        await self.run(lambda: self.files.delete(key))
        self._undeleted.discard(key)

    async def delete_again(self) -> None:
        """Try again to delete what could not be deleted."""
        for key in list(self._undeleted):
            with suppress(OSError):
                await self.delete(key)

    def grow(self, owner: bytes, by: int) -> None:
        self.used += by
        self.used_by[owner] += by
        if by > 0 and self.used > self.cap:
            self._on_full()


class Saver:
    """Writes one session's log to its file, in the background and in order; what comes meanwhile goes with the next.

    snapshot: gives all records of the session. They replace the file after `mark_stale`, `rewrite` or an error; else
    new records are appended. size: bytes that the file was left with. error: why the file is behind, None if it is not.
    """

    def __init__(
        self,
        disk: SessionDisk,
        key: str,
        snapshot: Callable[[], list[LogRecord]],
        size: int = 0,
        owner: bytes = b"",
    ) -> None:
        self.error: OSError | None = None
        self._disk = disk
        self.key = key
        self._owner = owner
        self._snapshot = snapshot
        self.size = 0
        self._new: list[LogRecord] = []
        self._stale = False
        self._deleted = False
        self._task: asyncio.Task[None] | None = None
        self._resize(size)

    def append(self, record: LogRecord) -> None:
        self._new.append(record)
        self._start()

    def mark_stale(self) -> None:
        """The file is not to be appended to any more: the next note writes it anew."""
        self._stale = True

    def rewrite(self) -> None:
        self.mark_stale()
        self._start()

    def is_at_rest(self) -> bool:
        """Nothing is being written."""
        return self._task is None and not self._deleted

    def set_behind(self, error: OSError) -> None:
        self._stale, self.error = True, error

    def delete(self) -> None:
        self._deleted = True
        self._resize(0)
        self._start()

    async def wait_saved(self) -> None:
        """Wait until all that was noted is on the disk, or the file is deleted.

        Raises ApiError: 507 if it cannot be written, 500 if it cannot be deleted.
        """
        if self._task is not None:
            await asyncio.wait([self._task])
        if self.error is not None:
            raise not_deleted(self.error) if self._deleted else not_saved(self.error)

    def _start(self) -> None:
        if self._task is None:
            self._task = self._disk.start(self._run())

    async def _run(self) -> None:
        try:
            while (self._new or self._stale) and not self._deleted:
                await self._write()
            if self._deleted:
                await self._disk.delete(self.key)
            self.error = None
        except Exception as error:  # Also a record that cannot be written: no turn is lost in silence.
            self.set_behind(error if isinstance(error, OSError) else OSError(errno.EINVAL, str(error)))
            what = "a session's file is not deleted" if self._deleted else "a session is not saved"
            structlog.get_logger().error(what, key=self.key, error=str(error))
        finally:
            self._task = None

    async def _write(self) -> None:
        """One call to the disk. A file that is not as it was left is stale. Raises OSError."""
        new, self._new = self._new, []
        if self._stale:
            self._stale = False
            snapshot = self._snapshot()
            self._resize(await self._disk.run(lambda: self._disk.files.replace(self.key, snapshot)))
        else:
            size = self.size
            try:
                self._resize(size + await self._disk.run(lambda: self._disk.files.append(self.key, new, size)))
            except FileNotFoundError as error:
                structlog.get_logger().warning("a session's file is written anew", key=self.key, error=error.strerror)
                self._stale = True

    def _resize(self, size: int) -> None:
        size = 0 if self._deleted else size
        growth, self.size = size - self.size, size
        self._disk.grow(self._owner, growth)


def not_deleted(error: OSError) -> ApiError:
    message = f"the session is closed, but its file is still there, which is tried again: {error.strerror}"
    return ApiError(500, message, "server_error", code="session_not_deleted")


def not_created(error: OSError) -> ApiError:
    return ApiError(
        507,
        f"the session is not created, as it cannot be saved: {error.strerror}",
        "server_error",
        code=NOT_SAVED,
        headers=DO_NOT_RETRY,
    )


def not_saved(error: OSError) -> ApiError:
    """507, with the header that keeps clients from sending the same again."""
    message = f"the session goes on, but this is not saved, and would not survive a restart: {error.strerror}"
    return ApiError(507, message, "server_error", code=NOT_SAVED, headers=DO_NOT_RETRY)
