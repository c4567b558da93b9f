"""Writing of session logs to their files, in the background."""

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
NOT_SAVED = "session_not_saved"  # error code
T = TypeVar("T")


class SessionDisk:
    """The files of all sessions, which at most MAX_THREADS threads access at once, and the sizes of the logs."""

    def __init__(self, files: SessionFiles, cap: int, on_full: Callable[[], None]) -> None:
        """on_full: called when `used` grows beyond `cap` bytes."""
        self.files = files
        self.used = 0  # bytes of all logs
        self.used_by: Counter[bytes] = Counter()  # bytes of each owner's logs
        self.cap = cap
        self.closed = False
        self._on_full = on_full
        self._limiter = anyio.CapacityLimiter(MAX_THREADS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._undeleted: set[str] = set()  # keys of files that are still to be deleted

    async def run(self, work: Callable[[], T], abandon_on_cancel: bool = False) -> T:
        """Run `work`, a call of `self.files`, in a thread. A cancelled caller waits for its end, or abandons it."""
        return await anyio.to_thread.run_sync(work, limiter=self._limiter, abandon_on_cancel=abandon_on_cancel)

    def start(self, saving: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task. `close` waits for its end."""
        task = asyncio.ensure_future(saving)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Wait for all tasks, then unlock the folder."""
        self.closed = True
        while self._tasks:
            await asyncio.wait(self._tasks)
        self.files.close()

    async def delete(self, key: str) -> None:
        """Delete a session's file. Raises OSError, after which `delete_again` will try again."""
        self._undeleted.add(key)
        await self.run(lambda: self.files.delete(key))
        self._undeleted.discard(key)

    async def delete_again(self) -> None:
        """Try again to delete the files that could not be deleted."""
        for key in list(self._undeleted):
            with suppress(OSError):
                await self.delete(key)

    def grow(self, owner: bytes, by: int) -> None:
        """Change the number of bytes of an owner's logs by `by`, which may be negative."""
        self.used += by
        self.used_by[owner] += by
        if by > 0 and self.used > self.cap:
            self._on_full()


class Saver:
    """The background writer of one session's log.

    Records are written in order. All records that arrive during a write are written together afterwards. Normally
    records are appended; after `mark_stale`, `rewrite` or an error, a snapshot of all records replaces the file.
    """

    def __init__(
        self,
        disk: SessionDisk,
        key: str,
        snapshot: Callable[[], list[LogRecord]],
        size: int = 0,
        owner: bytes = b"",
    ) -> None:
        """snapshot: returns all records of the session. size: size of the existing file in bytes."""
        self.error: OSError | None = None  # why the file lacks records of the log; None if it is complete
        self._disk = disk
        self.key = key
        self._owner = owner
        self._snapshot = snapshot
        self.size = 0
        self._new: list[LogRecord] = []  # records to append
        self._stale = False  # the next write must replace the whole file
        self._deleted = False
        self._task: asyncio.Task[None] | None = None
        self._resize(size)

    def append(self, record: LogRecord) -> None:
        """Start to append a record to the file."""
        self._new.append(record)
        self._start()

    def mark_stale(self) -> None:
        """Have the next write replace the whole file, without starting one."""
        self._stale = True

    def rewrite(self) -> None:
        """Start to replace the whole file."""
        self.mark_stale()
        self._start()

    def is_at_rest(self) -> bool:
        """Return whether no write or deletion is in progress or pending."""
        return self._task is None and not self._deleted

    def set_behind(self, error: OSError) -> None:
        """Note that the file lacks records of the log, and must be replaced."""
        self._stale, self.error = True, error

    def delete(self) -> None:
        """Start to delete the file. A write in progress ends first."""
        self._deleted = True
        self._resize(0)
        self._start()

    async def wait_saved(self) -> None:
        """Wait until all records are on the disk, or until the file of a closed session is deleted.

        Raises ApiError 507 if the file cannot be written, and 500 if it cannot be deleted.
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
        except Exception as error:  # Catch everything, so that no turn is lost unnoticed.
            self.set_behind(error if isinstance(error, OSError) else OSError(errno.EINVAL, str(error)))
            what = "a session's file is not deleted" if self._deleted else "a session is not saved"
            structlog.get_logger().error(what, key=self.key, error=str(error))
        finally:
            self._task = None

    async def _write(self) -> None:
        """Append the new records, or replace a stale file. A file changed by others becomes stale. Raises OSError."""
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
                structlog.get_logger().warning("a session's file is written again", key=self.key, error=error.strerror)
                self._stale = True

    def _resize(self, size: int) -> None:
        """Record the file's size, and report its growth to `SessionDisk`."""
        size = 0 if self._deleted else size
        growth, self.size = size - self.size, size
        self._disk.grow(self._owner, growth)


def not_deleted(error: OSError) -> ApiError:
    """Return the error for a closed session whose file could not be deleted."""
    message = f"the session is closed, but its file could not be deleted yet; the server will retry: {error.strerror}"
    return ApiError(500, message, "server_error", code="session_not_deleted")


def not_created(error: OSError) -> ApiError:
    """Return the error for a new session that could not be saved."""
    return ApiError(
        507,
        f"the session is not created because it cannot be saved: {error.strerror}",
        "server_error",
        code=NOT_SAVED,
        headers=DO_NOT_RETRY,
    )


def not_saved(error: OSError) -> ApiError:
    """Return the error for a turn that could not be saved, with a header that keeps clients from repeating the turn."""
    message = f"the session continues, but this change is not saved and would be lost in a restart: {error.strerror}"
    return ApiError(507, message, "server_error", code=NOT_SAVED, headers=DO_NOT_RETRY)
