"""Sessions as in SGLang: /open_session, /close_session, and /generate with session_params."""

from contextlib import suppress
from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import Meta, Struct
from msgspec.structs import replace

from baton.actors.tokens import count, cut, unpack
from baton.api import errors
from baton.api.errors import ApiError
from baton.api.exchange import answer_json, new_id, read_body, ring_id, salt_of, submit
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
    """The body of POST /open_session."""

    capacity_of_str_len: Count  # required by SGLang, without effect here
    session_id: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    streaming: bool = False  # whether turns can only be appended, without branches
    timeout: Annotated[float, Meta(gt=0)] | None = None  # seconds without use after which the session is closed


class CloseSessionRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    session_id: str


class SessionParams(Struct, forbid_unknown_fields=True, kw_only=True):
    """The field session_params: the session, and the point in its history where the new turn begins."""

    id: str
    rid: str | None = None  # id of the request that the turn continues; None in a branching session: the beginning
    offset: int | None = None  # keep only so many tokens of the history
    replace: bool | None = None  # forget the turns after `rid`, and abort the session's running turn
    drop_previous_output: bool | None = None  # leave out the output of `rid`


@routes.post("/open_session")
async def open_session(request: web.Request) -> web.Response:
    sessions = request.app[SESSIONS]
    body = convert(await read_object(request), OpenSessionRequest)
    request.app[SERVER].ready()
    session = sessions.create(
        owner_of(request),
        body.session_id,
        salt_of(request),
        idle_timeout=body.timeout,
        branching=not body.streaming,
        id_field="session_id",
    )
    await sessions.wait_created(session)
    return answer_json(session.id)


@routes.post("/close_session")
async def close_session(request: web.Request) -> web.Response:
    """Close a session. Answer 200 even if there is no such session."""
    body = convert(await read_object(request), CloseSessionRequest)
    request.app[SERVER].loaded()
    session = request.app[SESSIONS].find(owner_of(request), body.session_id)
    if session is not None:
        close(request, session)
        with suppress(ApiError):
            await session.wait_saved()
    return web.Response()


@routes.post("/generate")
async def generate(request: web.Request) -> web.StreamResponse:
    """Answer a POST /generate, in a session or without a session."""
    body, params = await read_generate(request)
    return await (generate_turn(request, body, params) if params is not None else plain.generate(request, body))


async def read_generate(request: web.Request) -> tuple[plain.GenerateRequest, SessionParams | None]:
    """Read the body, and its field session_params if it is set. Raises ApiError: 400, 503."""
    fields = await read_body(request)
    params = fields.pop("session_params", None)
    body = convert(fields, plain.GenerateRequest, plain.IGNORED, plain.UNSUPPORTED)
    return body, read_params(params) if params else None


async def generate_turn(request: web.Request, body: plain.GenerateRequest, params: SessionParams) -> web.StreamResponse:
    """Run a turn of a session. Raises ApiError."""
    server = request.app[SERVER]
    model = server.ready(body.model)
    if plain.is_batch(body) or isinstance(body.rid, list):
        raise errors.bad_request("a turn of a session has one prompt, not a batch", "text", "invalid_value")
    session = request.app[SESSIONS].find(owner_of(request), params.id)
    if session is None:
        raise invalid(f"session {params.id!r} does not exist", "id")
    await end_replaced(request, session, params)
    if session.is_busy():
        raise invalid(f"session {params.id!r} is busy with another turn", "id")
    base = pick_base(session, params)
    id = body.rid or new_id("gen")
    if id in session.turns_by_request:
        raise errors.bad_request(f"rid: the session has a request {id!r} already", "rid", "duplicate_request_id")
    async with session.begin(id) as turn:
        turn.go_on_from(base)
        turn.replaces = bool(params.replace)
        salt = salt_of(request, plain.salt_in(body))
        items = await read_items(model, body, params, turn, salt)
        if session.closed:
            raise invalid(f"session {params.id!r} was closed", "id")
        turn.check_wanted()
        turn.prefill_only = items[0].scoring
        # In the ring the request has an id that no other API key can use. The client sees the id that it sent.
        own = replace(turn.bind(items[0].request), id=ring_id(request, id))
        with submit(request, [own]) as generation:
            turn.attach(generation, model.text.decode)
            if turn.cut_short:
                server.gateway.abort(own.id)
            writer = plain.GenerateWriter(model.text, body, items, generation)
            if body.stream:
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
    """With `replace`, abort the running turn of a branching session and wait for its end, unless `rid` is unknown."""
    running = session.running
    if not (session.branching and params.replace and session.is_busy() and running is not None):
        return
    if params.rid in (None, running.request) or params.rid in session.turns_by_request:
        if (id := running.ring_id) is not None:
            request.app[SERVER].gateway.abort(id)
        running.cut_short, running.replaced = True, params.rid != running.request
        await running.done.wait()


def pick_base(session: Session, params: SessionParams) -> Turn | None:
    """Return the turn that the new turn continues; None for the beginning of the session. Raises ApiError 400."""
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
    model: ServedModel, body: plain.GenerateRequest, params: SessionParams, turn: OpenTurn, salt: str
) -> list[plain.Item]:
    """Read the turn as one sequence. Its prompt is the history that the turn continues, followed by the new input.

    Raises ApiError: 400, 503.
    """
    before = turn.base_tokens
    if params.drop_previous_output and turn.base is not None:
        before = cut(before, 0, turn.base.end - count(turn.base.output))
    history = unpack(before)
    if params.offset:
        history = history[: params.offset]
    if body.text is not None and body.input_ids is None:
        assert isinstance(body.text, str)
        new = (await encode(model, body.text, not history, "text")).tokens
        body = replace(body, text=None, input_ids=new)
    if not body.input_ids and body.text is None:
        raise errors.bad_request("the turn is empty: give text or input_ids", "input_ids", "empty_turn")
    items = await plain.read_items(
        model, replace(body, input_ids=[*history, *(body.input_ids or [])], rid=turn.request), salt
    )
    if len(items) != 1:
        raise errors.bad_request("sampling_params.n must be 1 in a session", "sampling_params.n", "invalid_value")
    return items
