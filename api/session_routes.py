"""/v1/sessions: create, list, look at, fork, rewind and close."""

from typing import Annotated, Any

from aiohttp import web
from msgspec import Meta, Struct

from actors.tokens import count
from api import errors
from api.drafting import Count, Salt
from api.engine import SERVER, Server
from api.handling import answer_json
from api.parsing import convert, read_object
from api.security import owner_of
from api.session import Session
from api.session_log import Turn, turns

SessionId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,128}$")]


class CreateRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    id: SessionId | None = None
    cache_salt: Salt = ""
    idle_timeout: Annotated[float, Meta(gt=0)] | None = None


class ForkRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """turn: the last one that the fork has; all that have ended by default."""

    id: SessionId | None = None
    turn: Count | None = None
    after: Count | None = None


class RewindRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """turn: the last one that is kept; 0 keeps none."""

    turn: Count
    after: Count | None = None


async def create_session(request: web.Request) -> web.Response:
    server = request.app[SERVER]
    asked = convert(await read_object(request), CreateRequest)
    server.ready()
    session = server.sessions.create(owner_of(request), asked.id, asked.cache_salt, asked.idle_timeout)
    return answer_json(describe(session))


async def list_sessions(request: web.Request) -> web.Response:
    server = request.app[SERVER]
    server.ready()
    sessions = server.sessions.list(owner_of(request))
    return answer_json({"object": "list", "data": [describe(session) for session in sessions]})


async def get_session(request: web.Request) -> web.Response:
    server, session = find(request)
    server.ready()
    # Settles a turn that is over, so it comes before the log is read.
    description = describe(session)
    return answer_json(description | {"turns": [describe_turn(turn) for turn in turns(session.head)]})


async def delete_session(request: web.Request) -> web.Response:
    """Close; a turn that is running ends with `abort`."""
    server, session = find(request)
    session.check_after(read_after(request))
    server.sessions.close(session)
    if session.is_busy() and session.running is not None:
        server.gateway.abort(session.running.request)
    return answer_json({"id": session.id, "object": "session.deleted", "deleted": True})


async def fork_session(request: web.Request) -> web.Response:
    asked = convert(await read_object(request), ForkRequest)
    server, session = find(request)
    server.ready()
    session.check_after(asked.after)
    session.is_busy()
    turn = session.head if asked.turn is None else session.find(asked.turn)
    return answer_json(describe(server.sessions.fork(session, turn, asked.id)))


async def rewind_session(request: web.Request) -> web.Response:
    asked = convert(await read_object(request), RewindRequest)
    _, session = find(request)
    session.check_after(asked.after)
    session.rewind(asked.turn)
    return answer_json(describe(session))


def find(request: web.Request) -> tuple[Server, Session]:
    server = request.app[SERVER]
    return server, server.sessions.get(owner_of(request), request.match_info["session"])


def read_after(request: web.Request) -> int | None:
    after = request.query.get("after")
    if after is not None and not (after.isascii() and after.isdigit()):
        raise errors.bad_request("after must be the number of a turn", "after", "invalid_value")
    return int(after) if after is not None else None


def describe(session: Session) -> dict[str, Any]:
    """turn: the last one that has ended; position: the tokens of the history up to it."""
    busy = session.is_busy()
    return {
        "id": session.id,
        "object": "session",
        "created_at": session.created,
        "idle_timeout": session.idle_timeout,
        "status": "busy" if busy else "idle",
        "turn": session.number,
        "position": session.position,
        "parent": {"session": session.parent[0], "turn": session.parent[1]} if session.parent else None,
    }


def describe_turn(turn: Turn) -> dict[str, Any]:
    return {
        "turn": turn.number,
        "id": turn.request,
        "created_at": turn.created,
        "status": turn.status,
        "finish_reason": turn.finish_reason,
        "start": turn.start,
        "position": turn.end,
        "input_tokens": count(turn.input),
        "output_tokens": count(turn.output),
        "cached_tokens": turn.cached_tokens,
        "messages": turn.messages,
        "text": turn.answer,
    }
