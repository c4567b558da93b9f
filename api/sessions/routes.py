"""/v1/sessions: create, list, look at, fork, rewind, suspend and close."""

from contextlib import suppress
from typing import Annotated, Any

from aiohttp import web
from msgspec import Meta, Struct

from baton.actors.tokens import count
from baton.api.errors import ApiError
from baton.api.exchange import answer_json, salt_of
from baton.api.generation.fields import Count, Salt
from baton.api.parsing import convert, read_number, read_object
from baton.api.security import owner_of
from baton.api.server import SERVER
from baton.api.sessions.log import Turn, title, turns
from baton.api.sessions.session import Session
from baton.api.sessions.store import SESSIONS

routes = web.RouteTableDef()

SHOWN_PARTS = ("reasoning_content", "tool_calls")

SessionId = Annotated[str, Meta(pattern=r"^(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,128}\Z")]


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


@routes.post("/v1/sessions")
async def create_session(request: web.Request) -> web.Response:
    sessions = request.app[SESSIONS]
    asked = convert(await read_object(request), CreateRequest)
    request.app[SERVER].ready()
    session = sessions.create(owner_of(request), asked.id, salt_of(request, asked.cache_salt), asked.idle_timeout)
    await sessions.wait_created(session)
    return answer_json(describe(session))


@routes.get("/v1/sessions")
async def list_sessions(request: web.Request) -> web.Response:
    request.app[SERVER].ready()
    sessions = request.app[SESSIONS].list(owner_of(request))
    return answer_json({"object": "list", "data": [describe(session) for session in sessions]})


@routes.get("/v1/sessions/{session}")
async def get_session(request: web.Request) -> web.Response:
    request.app[SERVER].ready()
    session = find(request)
    session.settle_if_over()
    with suppress(ApiError):
        await session.wait_saved()
    return answer_json(describe(session) | {"turns": [describe_turn(turn) for turn in turns(session.head)]})


@routes.delete("/v1/sessions/{session}")
async def delete_session(request: web.Request) -> web.Response:
    """Close; a turn that is running ends with `abort`."""
    session = find(request)
    session.check_after(read_number(request.query, "after", "the number of a turn"))
    close(request, session)
    await session.wait_saved()
    return answer_json({"id": session.id, "object": "session.deleted", "deleted": True})


@routes.post("/v1/sessions/{session}/fork")
async def fork_session(request: web.Request) -> web.Response:
    asked = convert(await read_object(request), ForkRequest)
    request.app[SERVER].ready()
    sessions, session = request.app[SESSIONS], find(request)
    session.check_after(asked.after)
    turn = session.head if asked.turn is None else session.find(asked.turn)
    fork = sessions.fork(session, turn, asked.id)
    await sessions.wait_created(fork)
    return answer_json(describe(fork))


@routes.post("/v1/sessions/{session}/rewind")
async def rewind_session(request: web.Request) -> web.Response:
    asked = convert(await read_object(request), RewindRequest)
    sessions, session = request.app[SESSIONS], find(request)
    session.check_idle()
    session.check_after(asked.after)
    sessions.rewind(session, asked.turn)
    await session.wait_saved()
    return answer_json(describe(session))


@routes.post("/v1/sessions/{session}/suspend")
async def suspend_session(request: web.Request) -> web.Response:
    """Let the session's state leave its slot; answered when it is where it is to stay."""
    request.app[SERVER].ready()
    sessions, session = request.app[SESSIONS], find(request)
    await sessions.suspend(session)
    return answer_json({"id": session.id, "state": describe_state(session)})


def close(request: web.Request, session: Session) -> None:
    """A turn that is running ends with `abort`."""
    request.app[SESSIONS].close(session)
    if session.is_busy() and session.running is not None:
        request.app[SERVER].gateway.abort(session.running.ring_id)


def find(request: web.Request) -> Session:
    """Raises 404, 503."""
    request.app[SERVER].loaded()
    return request.app[SESSIONS].get(owner_of(request), request.match_info["session"])


def describe(session: Session) -> dict[str, Any]:
    """turn: the last one that has ended; position: the tokens of the history up to it; last_turn_at: null before it."""
    busy = session.is_busy()
    return {
        "id": session.id,
        "object": "session",
        "title": title(session.head),
        "created_at": session.created,
        "last_turn_at": session.head.created if session.head is not None else None,
        "idle_timeout": session.idle_timeout,
        "status": "busy" if busy else "idle",
        "turn": session.head_number,
        "position": session.position,
        "state": describe_state(session),
        "saved": session.saver.error is None if session.saver is not None else None,
        "parent": {"session": session.parent[0], "turn": session.parent[1]} if session.parent else None,
    }


def describe_state(session: Session) -> dict[str, Any]:
    """Where the ring has the state that the next turn goes on from, and how many tokens that has consumed."""
    return {"tier": session.state_tier, "position": session.state_position}


def describe_turn(turn: Turn) -> dict[str, Any]:
    """reasoning_content, tool_calls: only where the answer has some; text is then what is left of it."""
    parts: dict[str, Any] = {name: part for name, part in (turn.parts or {}).items() if name in SHOWN_PARTS}
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
        "text": turn.reply["content"] if turn.reply is not None else None,
        **parts,
    }
