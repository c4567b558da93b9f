"""The application: routes, and the one middleware that all requests pass."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog
from aiohttp import web
from structlog.contextvars import bound_contextvars

from api import admin, errors, tokenization
from api.errors import ApiError
from api.exchange import GENERATION, REQUEST_ID, STREAM_ERROR, TRACE, new_id
from api.generation.answers import milliseconds, summary
from api.generation.call import read_trace_context
from api.generation.engine import SERVER, Server
from api.openai import chat as openai_chat
from api.openai import completions as openai_completions
from api.page import routes as page
from api.responses import routes as responses
from api.responses import websocket
from api.security import Guard, cors_headers
from api.sessions import routes as session_routes
from api.sessions import turns as session_turns
from api.sglang import sessions as sglang_sessions
from api.version import VERSION

GUARD = web.AppKey("guard", Guard)
QUIET = frozenset({"/health", "/ready", "/metrics", "/debug/slots"})

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(server: Server) -> web.Application:
    """Raises ConfigError if the API keys cannot be read."""
    app = web.Application(middlewares=[front], client_max_size=server.config.body_limit)
    app[SERVER] = server
    app[GUARD] = Guard(server.config)
    app[websocket.OPEN_SOCKETS] = set()
    app.on_shutdown.append(websocket.close_all)
    app.on_shutdown.append(end_tasks)
    app.on_response_prepare.append(add_headers)
    app.add_routes(
        [
            web.get("/", page.page),
            web.get("/v1/models", admin.models),
            web.get("/v1/models/{model:.+}", admin.model),
            web.post("/v1/chat/completions", openai_chat.chat_completions),
            web.post("/v1/completions", openai_completions.completions),
            web.post("/v1/responses", responses.create_response),
            web.get("/v1/responses", websocket.connect, allow_head=False),
            web.get("/v1/responses/{response}", responses.get_response),
            web.delete("/v1/responses/{response}", responses.delete_response),
            web.post("/v1/responses/{response}/cancel", responses.cancel_response),
            web.get("/v1/responses/{response}/input_items", responses.get_input_items),
            web.post("/v1/sessions", session_routes.create_session),
            web.get("/v1/sessions", session_routes.list_sessions),
            web.get("/v1/sessions/{session}", session_routes.get_session),
            web.delete("/v1/sessions/{session}", session_routes.delete_session),
            web.post("/v1/sessions/{session}/turns", session_turns.create_turn),
            web.post("/v1/sessions/{session}/fork", session_routes.fork_session),
            web.post("/v1/sessions/{session}/rewind", session_routes.rewind_session),
            web.post("/v1/sessions/{session}/suspend", session_routes.suspend_session),
            web.post("/open_session", sglang_sessions.open_session),
            web.post("/close_session", sglang_sessions.close_session),
            web.post("/generate", sglang_sessions.generate),
            web.post("/tokenize", tokenization.tokenize),
            web.post("/detokenize", tokenization.detokenize),
            web.get("/health", admin.health),
            web.get("/ready", admin.ready),
            web.get("/version", admin.version),
            web.get("/server_info", admin.server_info),
            web.get("/get_server_info", admin.server_info),
            web.get("/model_info", admin.model_info),
            web.get("/get_model_info", admin.model_info),
            web.get("/metrics", admin.metrics),
            web.get("/debug/slots", admin.debug_slots),
            web.get("/debug/tree", admin.debug_tree),
            web.post("/abort_request", admin.abort_request),
            web.get("/flush_cache", admin.flush_cache, allow_head=False),
            web.post("/flush_cache", admin.flush_cache),
        ]
    )
    return app


async def end_tasks(app: web.Application) -> None:
    await app[SERVER].end_tasks()


@web.middleware
async def front(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Gives the request its ids; all that is logged on its way has that of its trace."""
    request[REQUEST_ID] = new_id("req")
    request[TRACE] = read_trace_context(request.headers.getall("traceparent", []))
    with bound_contextvars(trace_id=request[TRACE].trace_id):
        return await answer(request, handler)


async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Checks who calls, turns every failure into an error object, and writes the request's canonical log line."""
    started = time.monotonic()
    status, code = errors.CLIENT_LEFT, None
    try:
        response = await guarded(request, handler)
        status, code = response.status, request.get(STREAM_ERROR)
        return response
    except ApiError as error:
        status, code = error.status, error.code
        return error_response(error)
    except asyncio.CancelledError:
        raise
    except ConnectionError:
        return web.Response(status=errors.CLIENT_LEFT)  # Nobody reads it; aiohttp would log the exception as an error.
    except Exception as error:
        structlog.get_logger().exception("a handler failed", id=request[REQUEST_ID], path=request.path)
        status, code = 500, "internal_error"
        return error_response(errors.internal(f"the server failed: {type(error).__name__}"))
    finally:
        account(request, status, code, time.monotonic() - started)


async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
    request.app[GUARD].admit(request)
    if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
        return web.Response(status=204)
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        kept = {name: value for name, value in error.headers.items() if name == "Allow"}
        raise errors.from_status(error.status, describe(request, error), kept) from None


def describe(request: web.Request, error: web.HTTPException) -> str:
    match error.status:
        case 404:
            return f"there is nothing at {request.path}"
        case 405:
            return f"{request.path} does not take {request.method}"
        case 413:
            return f"the body is larger than {request.app[SERVER].config.body_limit} bytes (--body-limit)"
        case _:
            return error.text or error.reason


def error_response(error: ApiError) -> web.Response:
    return web.Response(
        body=error.encode(), status=error.status, headers=error.headers, content_type="application/json"
    )


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = f"baton/{VERSION}"
    response.headers["x-request-id"] = request.get(REQUEST_ID, "-")
    if TRACE in request:
        response.headers["x-trace-id"] = request[TRACE].trace_id
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers.update(cors_headers(request))


def account(request: web.Request, status: int, code: str | None, seconds: float) -> None:
    """The canonical line, and the figures, of an answered request."""
    server = request.app[SERVER]
    resource = request.match_info.route.resource
    server.metrics.answered(resource.canonical if resource is not None else "unknown", status)
    line = {
        "id": request[REQUEST_ID],
        "endpoint": f"{request.method} {request.path}",
        "status": status,
        "total_ms": milliseconds(seconds),
    }
    if code is not None:
        line["error"] = code
    generation = request.get(GENERATION)
    if generation is not None:
        line |= {"request": generation.members[0].request.id} | summary(generation)
        server.ended(generation, code or (str(status) if status >= 400 else None))
    log = structlog.get_logger()
    (log.debug if request.path in QUIET else log.info)("request", **line)
