"""Restoring of sessions from their files, at the server's start."""

from collections.abc import Callable

import numpy as np
import structlog

from baton.actors.tokens import Tokens
from baton.api.sessions.checks import check_turn
from baton.api.sessions.files import SessionFiles, StoredLog
from baton.api.sessions.log import Turn, history
from baton.api.sessions.records import DamagedLogError, RewindRecord, SessionHeader, TurnRecord, turn_of
from baton.api.sessions.session import Session


def read_sessions(files: SessionFiles, vocab_size: int, clock: Callable[[], float]) -> list[tuple[Session, int]]:
    """Read all sessions, least recently used first, each with the size of its file. This call blocks.

    A session with a token outside this model's vocabulary, in any turn, is skipped, and its file stays: it was probably
    written with another model. A file with records that no server writes is renamed to *.damaged.
    """
    found = []
    for stored in files.read_all():
        try:
            session = session_of(stored, clock)
        except DamagedLogError as damage:
            files.set_aside(stored.key, str(damage))
            continue
        if highest(stored) < vocab_size:
            found.append((session, stored.size))
        else:
            structlog.get_logger().error("a session is of another model", session=session.id, file=stored.key)
    return newest(files, sorted(found, key=lambda pair: pair[0].used))


def newest(files: SessionFiles, found: list[tuple[Session, int]]) -> list[tuple[Session, int]]:
    """Keep the last used of sessions with the same id. The other session was closed, but its file was not deleted."""
    by_id: dict[tuple[bytes, str], tuple[Session, int]] = {}
    for session, size in found:
        older = by_id.pop((session.owner, session.id), None)
        if older is not None:
            files.set_aside(older[0].key, f"there is a later session {session.id!r}")
        by_id[session.owner, session.id] = session, size
    return list(by_id.values())


def session_of(stored: StoredLog, clock: Callable[[], float]) -> Session:
    """Rebuild a session from its records. Raises DamagedLogError."""
    header, *records = stored.records
    if not isinstance(header, SessionHeader):
        raise DamagedLogError("its first record is not a header")
    session = Session(
        id=header.id,
        owner=header.owner,
        salt=header.salt,
        clock=clock,
        idle_timeout=header.idle_timeout,
        branching=header.branching,
        parent=header.parent,
        created=header.created,
        key=stored.key,
        highest_number=header.last_number,
        metadata=header.metadata,
        suspended=True,
    )
    session.used = clock() - stored.age
    known: dict[int, Turn] = {}
    for record in records:
        match record:
            case TurnRecord():
                last = next(reversed(known), 0)
                if record.number <= last:
                    raise DamagedLogError(f"turn {record.number} follows turn {last}")
                check_turn(record, known.get(record.previous))
                known[record.number] = turn = turn_of(record, known)
                session.append(turn, b"")  # the session's tokens are computed once, after the loop
            case RewindRecord(number):
                if number and number not in known:
                    raise DamagedLogError(f"it rewinds to turn {number}, which is missing")
                session.head = known.get(number)
            case SessionHeader():
                raise DamagedLogError("it has two headers")
    session.tokens = history(session.head)
    session.highest_number = max(session.highest_number, header.last_number)
    return session


def highest(stored: StoredLog) -> int:
    """Return the highest token id of all turns, including those that the history has dropped; 0 without tokens."""
    turns = [record for record in stored.records if isinstance(record, TurnRecord)]
    return max((highest_of(tokens) for turn in turns for tokens in (turn.input, turn.output)), default=0)


def highest_of(tokens: Tokens) -> int:
    """Return the highest token id, or 0 without tokens."""
    return int(np.frombuffer(tokens, dtype=np.int32).max(initial=0))
