"""Sessions as SGLang's clients use them: /open_session, /close_session, and /generate with session_params."""

from contextlib import suppress
from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import Meta, Struct
from msgspec.structs import replace

from baton.actors.tokens import count, cut, unpack
from baton.api import errors
from baton.api.errors import ApiError
from baton.api.exchange import answer_json, new_id, read_asked, ring_id, salt_of, submit
from baton.api.generation.answers import collect
from baton.api.generation.fields import Count
from baton.api.generation.request_builder import encode
from baton.api.generation.served_model import ServedModel
from baton.api.parsing import convert, read_object
from baton.api.security import owner_of
from baton.api.server import SERVER
from baton.api.sessions.log import Turn
from baton.api.sessions.routes import close
from baton.api.sessions.session import OpenTurn, Session
from baton.api.sessions.store import SESSIONS
from baton.api.sessions.turns import answer_saved
from baton.api.sglang import generate as plain
from baton.api.sse import stream

routes = web.RouteTableDef()


class OpenSessionRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """capacity_of_str_len is SGLang's and means nothing here. streaming: turns are only ever appended."""

    capacity_of_str_len: Count
    session_id: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    streaming: bool = False
    timeout: Annotated[float, Meta(gt=0)] | None = None


class CloseSessionRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    session_id: str


class SessionParams(Struct, forbid_unknown_fields=True, kw_only=True):
    """What the turn goes on from: the request `rid`, of whose history only `[:offset]`, or not its output.

    replace: what came after `rid` is forgotten, and `rid` itself aborted if it is running.
    """

    id: str
    rid: str | None = None
    offset: int | None = None
    replace: bool | None = None
    drop_previous_output: bool | None = None


@routes.post("/open_session")
async def open_session(request: web.Request) -> web.Response:
    sessions = request.app[SESSIONS]
    asked = convert(await read_object(request), OpenSessionRequest)
    request.app[SERVER].ready()
    session = sessions.create(
        owner_of(request),
        asked.session_id,
        salt_of(request),
        idle_timeout=asked.timeout,
        branching=not asked.streaming,
        id_field="session_id",
    )
    await sessions.wait_created(session)
    return answer_json(session.id)


@routes.post("/close_session")
async def close_session(request: web.Request) -> web.Response:
    """200 also for a session that is not there (any more)."""
    asked = convert(await read_object(request), CloseSessionRequest)
    request.app[SERVER].loaded()
    session = request.app[SESSIONS].find(owner_of(request), asked.session_id)
    if session is not None:
        close(request, session)
        with suppress(ApiError):
            await session.wait_saved()
    return web.Response()


@routes.post("/generate")
async def generate(request: web.Request) -> web.StreamResponse:
    """/generate: within a session, or without one."""
    asked, params = await read_generate(request)
    return await (generate_turn(request, asked, params) if params is not None else plain.generate(request, asked))


async def read_generate(request: web.Request) -> tuple[plain.GenerateRequest, SessionParams | None]:
    body = await read_asked(request)
    params = body.pop("session_params", None)
    asked = convert(body, plain.GenerateRequest, plain.IGNORED, plain.UNSUPPORTED)
    return asked, read_params(params) if params else None


async def generate_turn(
    request: web.Request, asked: plain.GenerateRequest, params: SessionParams
) -> web.StreamResponse:
    server = request.app[SERVER]
    model = server.ready(asked.model)
    if plain.is_batch(asked) or isinstance(asked.rid, list):
        raise errors.bad_request("a turn of a session is one prompt, not a batch", "text", "invalid_value")
    session = request.app[SESSIONS].find(owner_of(request), params.id)
    if session is None:
        raise invalid(f"session {params.id!r} does not exist", "id")
    await end_replaced(request, session, params)
    if session.is_busy():
        raise invalid(f"session {params.id!r} is in a turn, and has one at a time", "id")
    base = pick_base(session, params)
    id = asked.rid or new_id("gen")
    if id in session.turns_by_request:
        raise errors.bad_request(f"the session has a request {id!r} already", "rid", "duplicate_request_id")
    async with session.begin(id) as turn:
        turn.go_on_from(base)
        salt = salt_of(request, plain.salt_in(asked))
        items = await read_items(model, asked, params, turn, salt)
        if session.closed:
            raise invalid(f"session {params.id!r} was closed", "id")
        turn.prefill_only = items[0].scoring
        own = replace(turn.bind(items[0].request), id=ring_id(request, id))
        with submit(request, [own]) as generation:
            turn.attach(generation, model.text.decode)
            if params.replace:
                session.forget_after(base)
            writer = plain.GenerateWriter(model.text, asked, items, generation)
            if asked.stream:
                encoder = plain.GenerateEncoder(writer, alone=True)
                return await stream(request, generation, encoder, server.config.ping_interval, turn.save)
            [answer] = await collect(generation)
            return await answer_saved(request, turn, writer.result(0, answer))


def read_params(params: object) -> SessionParams:
    try:
        return msgspec.convert(params, SessionParams)
    except msgspec.ValidationError as error:
        raise errors.bad_request(f"session_params: {error}", "session_params", "invalid_value") from None


def invalid(message: str, field: str) -> errors.ApiError:
    return errors.bad_request(message, f"session_params.{field}", "invalid_session_params")


async def end_replaced(request: web.Request, session: Session, params: SessionParams) -> None:
    """`replace` aborts the turn that is running, if that is the one to go on from, or to be forgotten."""
    running = session.running
    if not (session.branching and params.replace and session.is_busy() and running is not None):
        return
    if params.rid in (None, running.request) or params.rid in session.turns_by_request:
        request.app[SERVER].gateway.abort(running.ring_id)
        await running.done.wait()


def pick_base(session: Session, params: SessionParams) -> Turn | None:
    if session.branching:
        if params.rid is not None and params.rid not in session.turns_by_request:
            raise invalid(f"the session has no request {params.rid!r}", "rid")
        return session.turns_by_request[params.rid] if params.rid is not None else None
    for name in ("replace", "drop_previous_output", "offset"):
        if getattr(params, name):
            raise invalid(f"streaming sessions do not support {name}", name)
    if params.rid is not None and (session.head is None or params.rid != session.head.request):
        raise invalid(f"the streaming session's last request is not {params.rid!r}", "rid")
    return session.head


async def read_items(
    model: ServedModel, asked: plain.GenerateRequest, params: SessionParams, turn: OpenTurn, salt: str
) -> list[plain.Item]:
    """The ring's request: the history that the turn goes on from, with the new input behind it."""
    before = turn.base_tokens
    if params.drop_previous_output and turn.base is not None:
        before = cut(before, 0, turn.base.end - count(turn.base.output))
    kept = unpack(before)
    if params.offset:
        kept = kept[: params.offset]
    if asked.text is not None and asked.input_ids is None:
        assert isinstance(asked.text, str)
        new = (await encode(model, asked.text, not kept, "text")).tokens
        asked = replace(asked, text=None, input_ids=new)
    if not asked.input_ids and asked.text is None:
        raise errors.bad_request("there is nothing to feed", "input_ids", "empty_turn")
    items = await plain.read_items(
        model, replace(asked, input_ids=[*kept, *(asked.input_ids or [])], rid=turn.request), salt
    )
    if len(items) != 1:
        raise errors.bad_request("a turn of a session has one answer", "sampling_params.n", "invalid_value")
    return items
