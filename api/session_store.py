"""All sessions: found by their owners, dropped when idle, at most so many."""

import time
import uuid
from collections import OrderedDict
from collections.abc import Callable

from api import errors
from api.errors import ApiError
from api.session import Session
from api.session_log import Turn, history


class SessionStore:
    """Sessions by owner and id, least recently used first. One that is in a turn is never dropped."""

    def __init__(self, cap: int, idle_timeout: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._cap = cap
        self._idle_timeout = idle_timeout
        self._clock = clock
        self._sessions: OrderedDict[tuple[bytes, str], Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def create(
        self,
        owner: bytes,
        id: str | None = None,
        salt: str = "",
        idle_timeout: float | None = None,
        branching: bool = False,
    ) -> Session:
        """Raises 400 if the id is taken, 429 if all places are in turns."""
        self._drop_idle()
        id = id if id is not None else f"session-{uuid.uuid4().hex}"
        if (owner, id) in self._sessions:
            raise errors.bad_request(f"session {id!r} exists already", "session_id", "duplicate_session_id")
        timeout = self._idle_timeout if idle_timeout is None else min(idle_timeout, self._idle_timeout)
        session = Session(id=id, owner=owner, salt=salt, clock=self._clock, idle_timeout=timeout, branching=branching)
        self._make_room()
        self._sessions[owner, id] = session
        return session

    def find(self, owner: bytes, id: str) -> Session | None:
        session = self._sessions.get((owner, id))
        if session is None or self._drop_if_idle(session):
            return None
        self._sessions.move_to_end((owner, id))
        session.used = self._clock()
        return session

    def get(self, owner: bytes, id: str) -> Session:
        """Raises 404."""
        session = self.find(owner, id)
        if session is None:
            raise no_session(id)
        return session

    def list(self, owner: bytes) -> list[Session]:
        """The owner's, most recently used first."""
        self._drop_idle()
        return [session for session in reversed(self._sessions.values()) if session.owner == owner]

    def fork(self, session: Session, turn: Turn | None, id: str | None = None) -> Session:
        """A second session with the turns up to `turn`: the log is shared, and so are the tree's states."""
        fork = self.create(session.owner, id, session.salt, session.idle_timeout)
        fork.head, fork.tokens = turn, history(turn)
        fork.last_number = turn.number if turn is not None else 0
        fork.parent = (session.id, fork.last_number)
        return fork

    def close(self, session: Session) -> None:
        session.closed = True
        self._sessions.pop((session.owner, session.id), None)

    def _drop_idle(self) -> None:
        for session in list(self._sessions.values()):
            self._drop_if_idle(session)

    def _drop_if_idle(self, session: Session) -> bool:
        idle = not session.is_busy() and self._clock() - session.used > session.idle_timeout
        if idle:
            self.close(session)
        return idle

    def _make_room(self) -> None:
        while len(self._sessions) >= self._cap:
            idle = next((session for session in self._sessions.values() if not session.is_busy()), None)
            if idle is None:
                headers = {"Retry-After": str(errors.RETRY_QUEUE_S)}
                message = f"all {self._cap} sessions are in turns (--session-cap)"
                raise ApiError(429, message, "rate_limit_error", code="too_many_sessions", headers=headers)
            self.close(idle)


def no_session(id: str) -> ApiError:
    return ApiError(404, f"there is no session {id!r}", "not_found_error", "session", "session_not_found")
