"""The store of all sessions: look-up by owner, limits, and suspension or closing of sessions unused for long.

An owner is the digest of an API key, or empty without keys.
"""

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Protocol

import structlog
from aiohttp import web

from baton.actors.messages import Kept, Name, Suspended
from baton.actors.requests import Tier
from baton.actors.tokens import Tokens
from baton.api import errors
from baton.api.errors import ApiError
from baton.api.sessions.by_owner import ByOwner, Changes, Key
from baton.api.sessions.files import SessionFiles
from baton.api.sessions.log import Turn, history
from baton.api.sessions.restore import read_sessions
from baton.api.sessions.saver import Saver, SessionDisk, not_created
from baton.api.sessions.session import Session

# Sessions that other engines have taken over: so many are remembered.
MOST_MOVED = 10_000


class SessionGateway(Protocol):
    """The part of the gateway that sends names of sessions to the ring."""

    def name(self, session: str, salt: str, tokens: Tokens) -> asyncio.Future[None] | None: ...

    def unname(self, session: str) -> None: ...

    async def suspend(self, session: str) -> Suspended: ...


class SessionMover(Protocol):
    """The part of the peering that hands sessions over to other engines."""

    async def move(self, session: Session, engine: str) -> None:
        """Hand a session over to the peer engine of this name, and close it here.

        Raises ApiError: 409 during a turn, 503 if the peer does not take the session over.
        """


class SessionStore:
    """Sessions by owner and id, least recently used first. A limit never closes a session with a running turn."""

    def __init__(
        self,
        cap: int,
        idle_timeout: float,
        gateway: SessionGateway,
        files: SessionFiles | None = None,
        disk_cap: int = 0,
        log_cap: int | None = None,
        memory_cap: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the store, without restoring sessions.

        cap: maximum number of sessions.
        idle_timeout: seconds until an unused session is suspended, or closed if there are no files.
        files: the files of the logs; None if sessions are only in memory.
        disk_cap: maximum bytes of all logs on disk; above it sessions are closed.
        log_cap: bytes; a session with a longer log accepts no turn.
        memory_cap: maximum bytes of all sessions without files; above it sessions are closed.
        """
        self.mover: SessionMover | None = None  # None without peers
        self._cap = cap
        self._idle_timeout = idle_timeout
        self._gateway = gateway
        self._disk = SessionDisk(files, disk_cap, self._close_for_disk) if files is not None else None
        self._log_cap = log_cap
        self._memory_cap = memory_cap
        self._clock = clock
        self._sessions: ByOwner[Session] = ByOwner()
        self._by_key: dict[str, Session] = {}  # sessions by their names in the ring
        self._moved: dict[tuple[bytes, str], str] = {}  # engines that took sessions over, by owner and id

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, key: Key) -> bool:
        return key in self._sessions

    @property
    def keys(self) -> Collection[Key]:
        """The owners and ids of all sessions."""
        return self._sessions.keys

    @property
    def changes(self) -> Changes:
        return self._sessions.changes

    async def restore(self, vocab_size: int) -> None:
        """Restore the sessions from their files. Call this once, before any session is created.

        If it is cancelled, the store has no files any more, and the folder stays locked until the process ends: the
        thread that reads files may still rename some, or cut off a torn record.
        """
        disk = self._disk
        if disk is None:
            return
        try:
            found = await disk.run(lambda: read_sessions(disk.files, vocab_size, self._clock), abandon_on_cancel=True)
        except asyncio.CancelledError:
            self._disk = None
            raise
        for session, size in found:
            self._take_in(session, size)
        structlog.get_logger().info("sessions restored", sessions=len(self), log_bytes=disk.used)

    async def close_files(self) -> None:
        """Write all logs that are not on the disk yet, and unlock the folder. Further calls do nothing."""
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
        """Create a session. If there are `cap` already, close the least recently used session without a running turn.

        Sessions of the same owner are closed first.

        Await `wait_created` before the client learns of the session.

        idle_timeout: seconds; default and maximum: --session-idle-timeout.
        id_field: the field of the body with the id, for error messages.
        Raises ApiError 400 if the id is in use, and 429 if all sessions have running turns.
        """
        id = id if id is not None else f"session-{uuid.uuid4().hex}"
        timeout = self._idle_timeout if idle_timeout is None else min(idle_timeout, self._idle_timeout)
        session = Session(id=id, owner=owner, salt=salt, clock=self._clock, idle_timeout=timeout, branching=branching)
        self.adopt(session, id_field)
        return session

    def adopt(self, session: Session, id_field: str = "id") -> None:
        """Add a session that was made elsewhere. Otherwise as `create`."""
        earlier = self._sessions.get((session.owner, session.id))
        if earlier is not None and not self._drop_if_idle(earlier):
            raise errors.bad_request(f"session {session.id!r} exists already", id_field, "duplicate_session_id")
        self._make_room(session.owner)
        self._take_in(session)
        self._moved.pop((session.owner, session.id), None)
        self.name(session)
        if session.saver is not None:
            session.saver.rewrite()

    async def wait_created(self, session: Session) -> None:
        """Wait until a new session is on the disk. If it cannot be written, close it and raise ApiError 507."""
        try:
            await session.wait_saved()
        except ApiError:
            cause = session.saver.error if session.saver is not None else None
            self.close(session)
            if cause is None:
                raise
            raise not_created(cause) from None

    def find(self, owner: bytes, id: str) -> Session | None:
        """Return a session, and mark it as most recently used; return None if there is no such session."""
        session = self._sessions.get((owner, id))
        if session is None or self._drop_if_idle(session):
            return None
        self._sessions.touch((owner, id))
        session.used = self._clock()
        return session

    def get(self, owner: bytes, id: str) -> Session:
        """Return a session, and mark it as most recently used. Raises ApiError 404."""
        session = self.find(owner, id)
        if session is None:
            if (engine := self._moved.get((owner, id))) is not None:
                raise errors.session_moved(id, engine, "session")
            raise errors.unknown_session(id, "session")
        return session

    def __iter__(self) -> Iterator[Session]:
        """Yield all sessions, least recently used first."""
        return iter(self._sessions)

    def list(self, owner: bytes) -> list[Session]:
        """List the owner's sessions, most recently used first."""
        return [session for session in reversed(list(self._sessions.of(owner))) if not self._drop_if_idle(session)]

    def fork(self, session: Session, turn: Turn | None, id: str | None = None) -> Session:
        """Create a session with the turns up to `turn`. It shares the turns and their cached states with `session`."""
        fork = self.create(session.owner, id, session.salt, session.idle_timeout)
        fork.head, fork.tokens = turn, history(turn)
        fork.highest_number = turn.number if turn is not None else 0
        fork.parent = (session.id, fork.highest_number)
        self.name(fork)
        return fork

    def rewind(self, session: Session, number: int) -> None:
        """Delete the turns after `number`. Raises ApiError 400, 409."""
        session.rewind(number)
        self.name(session)

    def name(self, session: Session) -> None:
        """Send the session's tokens to the ring. Await `Session.wait_named` before a client learns of its state."""
        session.naming = self._gateway.name(session.key, session.salt, session.tokens)

    def moved(self, session: Session, engine: str) -> None:
        """Close a session that an engine of this name has taken over. Further requests are answered with the name."""
        self.close(session)
        self._moved[session.owner, session.id] = engine
        while len(self._moved) > MOST_MOVED:
            self._moved.pop(next(iter(self._moved)))

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
        """Move a session's state out of its slot to the lowest available tier. Raises ApiError: 409, 503."""
        session.check_idle()
        suspended = await self._gateway.suspend(session.key)
        session.state_tier, session.state_position = suspended.tier, suspended.position
        session.suspended = not session.is_busy()

    async def sweep(self) -> None:
        """Suspend or close sessions after their idle timeout. Repeat failed writes, and write changed files again."""
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
        """Yield the name and tokens of every session, for a new ring, which has no states yet."""
        for session in self._sessions:
            session.state_tier, session.state_position = "tokens", 0
            yield Name(session.key, session.salt, session.tokens)

    # Metrics

    def tiers(self) -> Counter[Tier]:
        """Count sessions by the tier of their state."""
        return Counter(session.state_tier for session in self._sessions)

    @property
    def suspended(self) -> int:
        """The number of suspended sessions."""
        return sum(session.suspended for session in self._sessions)

    @property
    def memory_bytes(self) -> int:
        """The bytes of all sessions in memory. A turn that forks share is counted once per fork."""
        return sum(session.memory_bytes for session in self._sessions)

    @property
    def log_bytes(self) -> int:
        """The bytes of all logs on disk."""
        return self._disk.used if self._disk is not None else 0

    # Internal

    def _take_in(self, session: Session, size: int = 0) -> None:
        """Add a session to the store. size: size of its file in bytes, 0 if it has no file yet."""
        if self._disk is not None:
            session.saver = Saver(self._disk, session.key, session.records, size, session.owner)
        self._sessions.put((session.owner, session.id), session)
        self._by_key[session.key] = session
        session.log_cap, session.make_room = self._log_cap, self._make_memory_free

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
        # A saver whose size has changed meanwhile has just written its file, so that file is in order.
        gone = {saver for saver, size in sizes.items() if size == saver.size != found.get(saver.key)}
        for saver in savers:
            if saver.is_at_rest() and (saver.error is not None or saver in gone):
                saver.rewrite()

    def _is_idle(self, session: Session) -> bool:
        """Return whether a session has no running turn and was not used for its idle timeout."""
        return not session.is_busy() and self._clock() - session.used > session.idle_timeout

    def _drop_if_idle(self, session: Session) -> bool:
        """Close a session after its idle timeout, unless sessions have files. Return whether it was closed."""
        dropped = self._disk is None and self._is_idle(session)
        if dropped:
            self.close(session)
        return dropped

    def _make_room(self, owner: bytes) -> None:
        """Close sessions until one more fits below the limit. Raises ApiError 429 if all sessions have running turns.

        Close the owner's sessions first, so that an owner of many sessions does not displace sessions of other owners.
        """
        while len(self._sessions) >= self._cap:
            session = first_idle(self._sessions.of(owner)) or first_idle(self._sessions)
            if session is None:
                headers = {"Retry-After": str(errors.RETRY_QUEUE_S)}
                message = f"all {self._cap} sessions are in turns (--session-cap)"
                raise ApiError(429, message, "rate_limit_error", code="too_many_sessions", headers=headers)
            self.close(session)

    def _make_memory_free(self, session: Session) -> None:
        """Close sessions until all fit into `memory_cap`, before a turn of `session`, which stays.

        Sessions of the owner with most bytes are closed first. Raises ApiError 507 if no more can be closed.
        """
        cap = self._memory_cap
        if cap is None or self._disk is not None or (total := self.memory_bytes) <= cap:
            return
        used = Counter[bytes]()
        for each in self._sessions:
            used[each.owner] += each.memory_bytes
        while total > cap:
            closed = self._next_to_close(used, session)
            if closed is None:
                message = f"--session-memory ({cap} bytes) is full, and no session can be closed: all are in turns"
                raise ApiError(507, message, "server_error", code="sessions_full")
            total -= closed.memory_bytes
            used[closed.owner] -= closed.memory_bytes
            structlog.get_logger().warning("a session is closed for memory (--session-memory)", session=closed.id)
            self.close(closed)

    def _close_for_disk(self) -> None:
        """Close sessions until the logs fit into `disk_cap`, first sessions of the owner with most bytes.

        The most recently used session is never closed, however long its log is.
        """
        disk, latest = self._disk, next(reversed(self._sessions), None)
        assert disk is not None
        while disk.used > disk.cap and (session := self._next_to_close(disk.used_by, latest)) is not None:
            structlog.get_logger().warning("a session is closed for disk space (--session-disk)", session=session.id)
            self.close(session)

    def _next_to_close(self, used: Mapping[bytes, int], spared: Session | None) -> Session | None:
        """Return the least recently used session, without a running turn, of the owner that uses most bytes."""
        for owner in sorted(self._sessions.owners, key=used.__getitem__, reverse=True):
            session = first_idle(session for session in self._sessions.of(owner) if session is not spared)
            if session is not None:
                return session
        return None


def first_idle(sessions: Iterable[Session]) -> Session | None:
    """Return the first session without a running turn, or None."""
    return next((session for session in sessions if not session.is_busy()), None)


SESSIONS = web.AppKey("sessions", SessionStore)
