"""The store of all sessions: look-up by owner, limits, and the suspension or closing of idle sessions."""

import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Protocol

import structlog
from aiohttp import web

from baton.actors.messages import Kept, Name, Suspended
from baton.actors.requests import Tier
from baton.actors.tokens import Tokens
from baton.api import errors
from baton.api.errors import ApiError
from baton.api.sessions.by_owner import ByOwner
from baton.api.sessions.files import SessionFiles
from baton.api.sessions.log import Turn, history
from baton.api.sessions.restore import read_sessions
from baton.api.sessions.saver import Saver, SessionDisk, not_created
from baton.api.sessions.session import Session


class SessionGateway(Protocol):
    """The part of the gateway that handles names of sessions."""

    def name(self, session: str, salt: str, tokens: Tokens) -> None: ...

    def unname(self, session: str) -> None: ...

    async def suspend(self, session: str) -> Suspended: ...


class SessionStore:
    """Sessions by owner and id, least recently used first. A session in a turn is never closed to make room."""

    def __init__(
        self,
        cap: int,
        idle_timeout: float,
        gateway: SessionGateway,
        files: SessionFiles | None = None,
        disk_cap: int = 0,
        log_cap: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the store, without restoring sessions.

        cap: maximum number of sessions.
        idle_timeout: seconds until an unused session is suspended, or closed if there are no files.
        files: None if sessions live in memory only.
        disk_cap: bytes of all logs on disk; above it the least recently used sessions are closed.
        log_cap: bytes of one session's log; a longer one takes no further turn.
        """
        self._cap = cap
        self._idle_timeout = idle_timeout
        self._gateway = gateway
        self._disk = SessionDisk(files, disk_cap, self._close_for_disk) if files is not None else None
        self._log_cap = log_cap
        self._clock = clock
        self._sessions: ByOwner[Session] = ByOwner()
        self._by_key: dict[str, Session] = {}  # by the ring's names

    def __len__(self) -> int:
        return len(self._sessions)

    async def restore(self, vocab_size: int) -> None:
        """Read the sessions of the folder. Call this once, before any session is created."""
        if self._disk is None:
            return
        files = self._disk.files
        for session, size in await self._disk.run(lambda: read_sessions(files, vocab_size, self._clock)):
            self._take_in(session, size)
        structlog.get_logger().info("sessions restored", sessions=len(self), log_bytes=self._disk.used)

    async def close_files(self) -> None:
        """Write what is not on the disk yet, and release the folder. Further calls do nothing."""
        if self._disk is None or self._disk.closed:
            return
        for session in self._sessions:
            session.settle_if_over()
        await self._write_again(self._disk)
        await self._disk.delete_again()
        await self._disk.close()

    def create(
        self,
        owner: bytes,
        id: str | None = None,
        salt: str = "",
        idle_timeout: float | None = None,
        branching: bool = False,
        id_field: str = "id",
    ) -> Session:
        """Create a session. If there are `cap` already, close the least recently used idle one, the owner's own first.

        Await `wait_created` before the client learns of the session.

        idle_timeout: seconds; at most, and by default, the server's.
        id_field: the field of the client's body that holds the id.
        Raises 400 if the id is in use, 429 if all sessions are in turns.
        """
        id = id if id is not None else f"session-{uuid.uuid4().hex}"
        earlier = self._sessions.get((owner, id))
        if earlier is not None and not self._drop_if_idle(earlier):
            raise errors.bad_request(f"session {id!r} exists already", id_field, "duplicate_session_id")
        timeout = self._idle_timeout if idle_timeout is None else min(idle_timeout, self._idle_timeout)
        session = Session(id=id, owner=owner, salt=salt, clock=self._clock, idle_timeout=timeout, branching=branching)
        self._make_room(owner)
        self._take_in(session)
        self._gateway.name(session.key, session.salt, session.tokens)
        if session.saver is not None:
            session.saver.rewrite()
        return session

    async def wait_created(self, session: Session) -> None:
        """Wait until a new session is on the disk. If it cannot be written, close it and raise 507."""
        try:
            await session.wait_saved()
        except ApiError:
            cause = session.saver.error if session.saver is not None else None
            self.close(session)
            if cause is None:
                raise
            raise not_created(cause) from None

    def find(self, owner: bytes, id: str) -> Session | None:
        """Return a session and note that it is used, or return None."""
        session = self._sessions.get((owner, id))
        if session is None or self._drop_if_idle(session):
            return None
        self._sessions.touch((owner, id))
        session.used = self._clock()
        return session

    def get(self, owner: bytes, id: str) -> Session:
        """Return a session and note that it is used. Raises 404."""
        session = self.find(owner, id)
        if session is None:
            raise errors.unknown_session(id, "session")
        return session

    def list(self, owner: bytes) -> list[Session]:
        """List the owner's sessions, most recently used first."""
        return [session for session in reversed(list(self._sessions.of(owner))) if not self._drop_if_idle(session)]

    def fork(self, session: Session, turn: Turn | None, id: str | None = None) -> Session:
        """Create a session with the turns up to `turn`. It shares them, and the states in the tree, with `session`."""
        fork = self.create(session.owner, id, session.salt, session.idle_timeout)
        fork.head, fork.tokens = turn, history(turn)
        fork.highest_number = turn.number if turn is not None else 0
        fork.parent = (session.id, fork.highest_number)
        self._gateway.name(fork.key, fork.salt, fork.tokens)
        return fork

    def rewind(self, session: Session, number: int) -> None:
        """Delete the turns after `number`. Raises 400, 409."""
        session.rewind(number)
        self._gateway.name(session.key, session.salt, session.tokens)

    def close(self, session: Session) -> None:
        """Remove a session, its name in the ring, and its file."""
        session.closed = True
        if self._sessions.pop((session.owner, session.id)) is None:
            return
        del self._by_key[session.key]
        self._gateway.unname(session.key)
        if session.saver is not None:
            session.saver.delete()

    async def suspend(self, session: Session) -> None:
        """Move its state out of its slot to the lowest tier there is. Raises 409, 503."""
        session.check_idle()
        suspended = await self._gateway.suspend(session.key)
        session.state_tier, session.state_position = suspended.tier, suspended.position
        session.suspended = not session.is_busy()

    async def sweep(self) -> None:
        """Suspend or close idle sessions, and write logs again that could not be written or whose files are gone."""
        if self._disk is not None:
            await self._disk.delete_again()
            await self._write_again(self._disk)
        for session in list(self._sessions):
            if self._drop_if_idle(session) or self._disk is None or session.suspended or session.closed:
                continue
            if self._is_idle(session):
                with suppress(ApiError):
                    await self.suspend(session)

    # Called by the gateway

    def on_kept(self, message: Kept) -> None:
        """Note where the ring keeps a session's state."""
        session = self._by_key.get(message.session)
        if session is not None:
            session.state_tier, session.state_position = message.tier, message.position

    def names(self) -> Iterable[Name]:
        """Yield the name of every session and its tokens, for a ring that has just been made and has no states."""
        for session in self._sessions:
            session.state_tier, session.state_position = "tokens", 0
            yield Name(session.key, session.salt, session.tokens)

    # Metrics

    def tiers(self) -> Counter[Tier]:
        """Count sessions by the place of their state."""
        return Counter(session.state_tier for session in self._sessions)

    @property
    def suspended(self) -> int:
        """The number of suspended sessions."""
        return sum(session.suspended for session in self._sessions)

    @property
    def memory_bytes(self) -> int:
        """Bytes of all logs in memory. Turns that forks share count for each."""
        return sum(session.log_bytes for session in self._sessions)

    @property
    def log_bytes(self) -> int:
        """Bytes of all logs on disk."""
        return self._disk.used if self._disk is not None else 0

    # Internal

    def _take_in(self, session: Session, size: int = 0) -> None:
        """Add a session. size: bytes of its file."""
        if self._disk is not None:
            session.saver = Saver(self._disk, session.key, session.records, size, session.owner)
        self._sessions.put((session.owner, session.id), session)
        self._by_key[session.key] = session
        session.log_cap = self._log_cap

    async def _write_again(self, disk: SessionDisk) -> None:
        """Start to write the logs that could not be written, and those whose files were changed or deleted."""
        savers = [session.saver for session in self._sessions if session.saver is not None]
        sizes = {saver: saver.size for saver in savers if saver.is_at_rest()}
        try:
            found = await disk.run(disk.files.sizes)
        except OSError as error:
            structlog.get_logger().error("no session can be saved", error=str(error))
            for saver in sizes:
                saver.set_behind(error)
            return
        # Files that changed size while the disk was read were written by their savers, and are in order.
        gone = {saver for saver, size in sizes.items() if size == saver.size != found.get(saver.key)}
        for saver in savers:
            if saver.is_at_rest() and (saver.error is not None or saver in gone):
                saver.rewrite()

    def _is_idle(self, session: Session) -> bool:
        """Whether a session has not been used for its idle timeout."""
        return not session.is_busy() and self._clock() - session.used > session.idle_timeout

    def _drop_if_idle(self, session: Session) -> bool:
        """Close an idle session if sessions live in memory only. Return whether it was closed."""
        dropped = self._disk is None and self._is_idle(session)
        if dropped:
            self.close(session)
        return dropped

    def _make_room(self, owner: bytes) -> None:
        """Close idle sessions until there is room for one more. Raises 429.

        The owner's own are closed first, so that an owner of many does not displace the sessions of others.
        """
        while len(self._sessions) >= self._cap:
            session = first_idle(self._sessions.of(owner)) or first_idle(self._sessions)
            if session is None:
                headers = {"Retry-After": str(errors.RETRY_QUEUE_S)}
                message = f"all {self._cap} sessions are in turns (--session-cap)"
                raise ApiError(429, message, "rate_limit_error", code="too_many_sessions", headers=headers)
            self.close(session)

    def _close_for_disk(self) -> None:
        """Close sessions until the logs fit into --session-disk, those of the owner with most bytes first.

        The most recently used session stays, however long its log is.
        """
        assert self._disk is not None
        while self._disk.used > self._disk.cap and (session := self._next_to_close()) is not None:
            structlog.get_logger().warning("a session is closed for disk space (--session-disk)", session=session.id)
            self.close(session)

    def _next_to_close(self) -> Session | None:
        """Return the least recently used session, not in a turn, of the owner with most bytes on the disk."""
        assert self._disk is not None
        latest = next(reversed(self._sessions), None)
        for owner in sorted(self._sessions.owners, key=self._disk.used_by.__getitem__, reverse=True):
            session = first_idle(session for session in self._sessions.of(owner) if session is not latest)
            if session is not None:
                return session
        return None


def first_idle(sessions: Iterable[Session]) -> Session | None:
    """Return the first session that is not in a turn."""
    return next((session for session in sessions if not session.is_busy()), None)


SESSIONS = web.AppKey("sessions", SessionStore)
