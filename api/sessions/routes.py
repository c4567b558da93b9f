"""/v1/sessions: create, list, show, fork, rewind, suspend and close sessions."""

from contextlib import suppress
from typing import Annotated, Any

from aiohttp import web
from msgspec import Meta, Struct

from baton.actors.tokens import count
from baton.api import errors
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

# Parts of an answer that the JSON object of a turn contains in addition to the text.
SHOWN_PARTS = ("reasoning_content", "tool_calls")

SessionId = Annotated[str, Meta(pattern=r"^(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,128}\Z")]


class CreateRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/sessions."""

    id: SessionId | None = None  # default: a random id
    cache_salt: Salt = ""
    idle_timeout: Annotated[float, Meta(gt=0)] | None = None  # seconds; default and maximum: --session-idle-timeout


class ForkRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/sessions/{session}/fork."""

    id: SessionId | None = None  # id of the new session; default: a random id
    turn: Count | None = None  # number of the last turn that the fork gets; default: the last turn of the session
    after: Count | None = None  # number of the last turn that the client knows; 409 if the last turn is another


class RewindRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/sessions/{session}/rewind."""

    turn: Count  # number of the last turn to keep; 0 keeps none
    after: Count | None = None  # number of the last turn that the client knows; 409 if the last turn is another


class MoveRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/sessions/{session}/move."""

    engine: Annotated[str, Meta(min_length=1)]  # name of the peer, as in /debug/peers
    after: Count | None = None  # number of the last turn that the client knows; 409 if the last turn is another


@routes.post("/v1/sessions")
async def create_session(request: web.Request) -> web.Response:
    sessions = request.app[SESSIONS]
    body = convert(await read_object(request), CreateRequest)
    request.app[SERVER].ready()
    session = sessions.create(owner_of(request), body.id, salt_of(request, body.cache_salt), body.idle_timeout)
    await sessions.wait_created(session)
    return answer_json(describe(session))


@routes.get("/v1/sessions")
async def list_sessions(request: web.Request) -> web.Response:
    request.app[SERVER].ready()
    sessions = request.app[SESSIONS].list(owner_of(request))
    for session in sessions:
        await session.wait_named()
    return answer_json({"object": "list", "data": [describe(session) for session in sessions]})


@routes.get("/v1/sessions/{session}")
async def get_session(request: web.Request) -> web.Response:
    request.app[SERVER].ready()
    session = find(request)
    session.settle_if_over()
    with suppress(ApiError):  # A failed write is no error here: the field "saved" reports it.
        await session.wait_saved()
    await session.wait_named()
    return answer_json(describe(session) | {"turns": [describe_turn(turn) for turn in turns(session.head)]})


@routes.delete("/v1/sessions/{session}")
async def delete_session(request: web.Request) -> web.Response:
    """Close the session. A running turn ends with finish_reason "abort"."""
    session = find(request)
    session.check_after(read_number(request.query, "after", "the number of a turn"))
    close(request, session)
    await session.wait_saved()
    return answer_json({"id": session.id, "object": "session.deleted", "deleted": True})


@routes.post("/v1/sessions/{session}/fork")
async def fork_session(request: web.Request) -> web.Response:
    body = convert(await read_object(request), ForkRequest)
    request.app[SERVER].ready()
    sessions, session = request.app[SESSIONS], find(request)
    session.check_after(body.after)
    turn = session.head if body.turn is None else session.find(body.turn)
    fork = sessions.fork(session, turn, body.id)
    await sessions.wait_created(fork)
    await fork.wait_named()
    return answer_json(describe(fork))


@routes.post("/v1/sessions/{session}/rewind")
async def rewind_session(request: web.Request) -> web.Response:
    body = convert(await read_object(request), RewindRequest)
    sessions, session = request.app[SESSIONS], find(request)
    session.check_idle()
    session.check_after(body.after)
    sessions.rewind(session, body.turn)
    await session.wait_saved()
    await session.wait_named()
    return answer_json(describe(session))


@routes.post("/v1/sessions/{session}/suspend")
async def suspend_session(request: web.Request) -> web.Response:
    """Move the session's state out of its slot. The answer comes when it is in its final place."""
    request.app[SERVER].ready()
    sessions, session = request.app[SESSIONS], find(request)
    await sessions.suspend(session)
    return answer_json({"id": session.id, "state": describe_state(session)})


@routes.post("/v1/sessions/{session}/move")
async def move_session(request: web.Request) -> web.Response:
    """Hand the session over to another engine, with its state. The answer comes when that engine has the session."""
    body = convert(await read_object(request), MoveRequest)
    request.app[SERVER].ready()
    sessions, session = request.app[SESSIONS], find(request)
    session.check_after(body.after)
    if sessions.mover is None:
        raise errors.bad_request("this server has no peers (--peer, --peer-listen)", "engine", "no_peers")
    await sessions.mover.move(session, body.engine)
    return answer_json({"id": session.id, "object": "session.moved", "engine": body.engine})


def close(request: web.Request, session: Session) -> None:
    """Close a session. A running turn ends with finish_reason "abort"."""
    request.app[SESSIONS].close(session)
    if session.is_busy() and session.running is not None and (id := session.running.ring_id) is not None:
        request.app[SERVER].gateway.abort(id)


def find(request: web.Request) -> Session:
    """Return the session in the path. Raises ApiError 404, or 503 while loading."""
    request.app[SERVER].loaded()
    return request.app[SESSIONS].get(owner_of(request), request.match_info["session"])


def describe(session: Session) -> dict[str, Any]:
    """Return the session object.

    turn: the last turn that has ended; 0 before the first.
    position: length of the history up to that turn, in tokens.
    last_turn_at: null before the first turn.
    """
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
    """Return where the state is that the next turn continues from, and how many tokens it has consumed."""
    return {"tier": session.state_tier, "position": session.state_position}


def describe_turn(turn: Turn) -> dict[str, Any]:
    """Return the object of a turn. Reasoning and tool calls, if the answer has any, are not part of its text."""
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
