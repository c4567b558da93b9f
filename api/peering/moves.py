"""Sessions that move between this server and its peers."""

import asyncio
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import structlog

from baton.actors.peers.channel import PEERS_FRAME
from baton.actors.peers.engines import Done, PeerEngines
from baton.actors.peers.frames import Hand
from baton.actors.peers.node import LONGEST_PAUSE_S
from baton.actors.runtime.explain import CachedState
from baton.actors.tokens import cut
from baton.api import errors
from baton.api.errors import ApiError
from baton.api.exchange import new_id
from baton.api.sessions.files import StoredLog
from baton.api.sessions.records import DamagedLogError, decode, encode
from baton.api.sessions.restore import highest, session_of
from baton.api.sessions.session import Session
from baton.api.sessions.store import SessionStore

LINK_S = 2 * LONGEST_PAUSE_S  # how long to wait for the link to a peer that has none
FRAME_OVERHEAD = 64  # maximum bytes of a Hand without its log


class Moves:
    """The handover of sessions to peers and from peers.

    An engine keeps a session until the peer confirms that it has the session, on its disk if it has one. If the link
    ends before the confirmation, both engines may have the session, but it is not lost.
    """

    def __init__(
        self,
        engines: PeerEngines,
        sessions: SessionStore,
        vocab_size: int,
        accepts: Callable[[bytes], bool],
        states: Callable[[], list[CachedState]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """accepts: returns whether requests with the API key of this digest are accepted here.

        states: returns the cached states that belong to no session, the state of most worth first
        """
        self._engines, self._sessions, self._vocab_size = engines, sessions, vocab_size
        self._accepts, self._states, self._clock = accepts, states, clock
        self._tasks: set[asyncio.Task[None]] = set()
        engines.heir = self

    async def move(self, session: Session, engine: str) -> None:
        """Hand a session over to the peer engine of this name, and close it here.

        Raises ApiError: 409 during a turn, 503 if the peer does not take the session over.
        """
        with session.occupy(new_id("move")):
            log = encode(session.records())
            if len(log) > PEERS_FRAME - FRAME_OVERHEAD:
                raise errors.bad_request(f"session {session.id!r} is too long to be moved", "session", "session_full")
            answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            self._engines.hand(engine, log, session.state_position, partial(resolve, answer))
            error = await answer
        if error:
            raise errors.unavailable(f"session {session.id!r} was not moved: {error}", "session_not_moved")
        self._sessions.moved(session, engine)
        structlog.get_logger().info("session moved", session=session.id, engine=engine)
        await session.wait_saved()

    async def move_all(self, engine: str) -> None:
        """Hand over all sessions, then the states that belong to no session, the state of most worth first.

        If the peer has just been restarted, wait for its link.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(LINK_S):
                while not self._engines.is_linked(engine):  # noqa: ASYNC110 (links have no event to wait for)
                    await asyncio.sleep(LINK_S / 100)
        await self._move_sessions(engine)
        states = self._states()
        count = sum([await self._give(state, engine) for state in states])
        structlog.get_logger().info("states handed over", engine=engine, states=count, of=len(states))

    async def _give(self, state: CachedState, engine: str) -> bool:
        """Let the peer fetch a state. Return whether the peer has the state now."""
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._engines.give(engine, state.salt, state.tokens, partial(resolve, answer))
        return not await answer

    async def _move_sessions(self, engine: str) -> None:
        """Hand every session over. Wait for the end of a running turn. A session that is refused stays here."""
        for session in list(self._sessions):
            while session.is_busy() and session.running is not None:
                await session.running.done.wait()
            if session.closed:
                continue
            try:
                await self.move(session, engine)
            except ApiError as error:
                structlog.get_logger().warning("a session stays", session=session.id, reason=error.message)

    # Sessions of peers

    def take_over(self, frame: Hand, link: str, done: Done) -> None:
        task = asyncio.ensure_future(self._take_over(frame, link, done))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _take_over(self, frame: Hand, link: str, done: Done) -> None:
        try:
            session = self._read(frame.log)
            self._sessions.adopt(session)
            await self._sessions.wait_created(session)
        except DamagedLogError as damage:
            done(f"its log cannot be read: {damage}")
            return
        except ApiError as error:
            done(error.message)
            return
        structlog.get_logger().info("session taken over", session=session.id, link=link)
        if 0 < frame.position <= session.position:
            await self._fetch(session, frame.position, link)
        done("")

    def _read(self, log: bytes) -> Session:
        """Read a session from its records. Raises DamagedLogError, or ApiError if it cannot be served here."""
        records, end = decode(log)
        if end < len(log):
            raise DamagedLogError("it is cut off")
        stored = StoredLog(uuid.uuid4().hex, records, 0.0, len(log))
        session = session_of(stored, self._clock)
        if highest(stored) >= self._vocab_size:
            raise DamagedLogError("it has tokens that the model does not have")
        if not self._accepts(session.owner):
            raise errors.forbidden("its API key is not accepted here")
        return session

    async def _fetch(self, session: Session, position: int, link: str) -> None:
        """Fetch the session's state from the peer. If that fails, the next turn computes the state from the tokens."""
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._engines.fetch(link, session.salt, cut(session.tokens, 0, position), partial(resolve, answer))
        if error := await answer:
            structlog.get_logger().info("no state came with a session", session=session.id, reason=error)
        elif not session.closed and not session.is_busy():
            self._sessions.name(session)
            await session.wait_named()


def resolve(answer: "asyncio.Future[str]", error: str) -> None:
    """Set the result of a future, unless it was cancelled."""
    if not answer.done():
        answer.set_result(error)
