"""The application: its handlers and stores, and the middleware that every request passes."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog
from aiohttp import HttpVersion11, web
from aiohttp.web_protocol import RequestPayloadError
from structlog.contextvars import bound_contextvars

from baton.actors.runtime.digests import Digester
from baton.api import admin, errors, tokenization
from baton.api.anthropic import routes as messages
from baton.api.anthropic.errors import error_response, is_messages
from baton.api.connections.body import check_encoding, unreadable
from baton.api.connections.limits import connection_limits
from baton.api.connections.registry import CONNECTIONS, Connections
from baton.api.errors import ApiError
from baton.api.events import routes as events
from baton.api.events.feed import Feed
from baton.api.events.places import DIGESTER, HEADER, PLACES, places_of
from baton.api.events.routes import FEED
from baton.api.exchange import GENERATION, REQUEST_ID, STREAM_ERROR, TRACE, new_id
from baton.api.generation.answers import milliseconds, summary
from baton.api.generation.request_context import read_trace_context
from baton.api.openai import chat, completions, embeddings, stored
from baton.api.page import routes as page
from baton.api.responses import conversations, counting, routes as responses, websocket
from baton.api.responses.store import RESPONSES, ResponseStore
from baton.api.resuming import ROUTED
from baton.api.security import GUARD, Guard, cors_headers
from baton.api.server import SERVER, Server
from baton.api.sessions import routes as sessions, turns
from baton.api.sessions.files import SessionFiles
from baton.api.sessions.store import SESSIONS, SessionStore
from baton.api.sglang import sessions as sglang
from baton.api.version import VERSION

HANDLERS = (
    page, chat, stored, completions, embeddings, responses, conversations, counting, websocket, messages, sessions,
    turns, sglang, tokenization, admin, events,
)  # fmt: skip
# Paths that monitors poll; their requests are logged at level debug only.
QUIET = frozenset({"/health", "/ready", "/metrics", "/debug/peers", "/debug/slots"})

EVENT_STREAM = "text/event-stream"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(server: Server) -> web.Application:
    """Build the application. Raises ConfigError if API keys cannot be read, or --session-dir cannot be used."""
    config = server.config
    app = web.Application(middlewares=[middleware], client_max_size=config.body_limit)
    app[SERVER] = server
    app[GUARD] = Guard(config)
    app[SESSIONS] = open_sessions(server)
    app[RESPONSES] = ResponseStore(config.response_retention, config.response_memory)
    app[CONNECTIONS] = Connections(connection_limits(config))
    app[websocket.OPEN_SOCKETS] = set()
    app[DIGESTER] = Digester()
    app[FEED] = Feed(server, (app[SESSIONS], app[RESPONSES]))
    server.metrics.watch_sessions(app[SESSIONS])
    server.metrics.watch_responses(app[RESPONSES])
    server.metrics.watch_connections(app[CONNECTIONS])
    app.on_shutdown.append(app[FEED].close)
    app.on_shutdown.append(app[CONNECTIONS].close)
    app.on_shutdown.append(websocket.close_all)
    app.on_shutdown.append(end_tasks)
    app.on_response_prepare.append(add_headers)
    for handlers in HANDLERS:
        app.add_routes([expecting(route) for route in handlers.routes if isinstance(route, web.RouteDef)])
    return app


def expecting(route: web.RouteDef) -> web.RouteDef:
    """Return the route with our handling of the Expect header."""
    return web.RouteDef(route.method, route.path, route.handler, {**route.kwargs, "expect_handler": meet_expectation})


async def meet_expectation(request: web.Request) -> None:
    """Answer `Expect: 100-continue`, and ignore other expectations.

    aiohttp would refuse other expectations with a plain-text answer before the middleware runs.
    """
    if request.headers["Expect"].lower() == "100-continue" and request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0


def open_sessions(server: Server) -> SessionStore:
    """Make the store of sessions and connect it to the gateway. Raises ConfigError if --session-dir cannot be used."""
    config = server.config
    sessions = SessionStore(
        config.session_cap,
        config.session_idle_timeout,
        server.gateway,
        SessionFiles(Path(config.session_dir)) if config.session_dir is not None else None,
        config.log_disk,
        config.session_log,
        config.session_memory,
    )
    server.gateway.sessions = sessions
    return sessions


async def end_tasks(app: web.Application) -> None:
    await app[SERVER].end_tasks()


@web.middleware
async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give the request its request and trace ids, and add the trace id to everything logged while it is handled."""
    request[REQUEST_ID] = new_id("req")
    request[TRACE] = read_trace_context(request.headers.getall("traceparent", []))
    connection = request.app[CONNECTIONS].of(request)
    with bound_contextvars(trace_id=request[TRACE].trace_id), connection.request():
        return await answer(request, handler)


async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Call `guarded`, turn every failure into an error response, and log one canonical line for the request."""
    started = time.monotonic()
    status, code = errors.CLIENT_LEFT, None
    try:
        response = await guarded(request, handler)
        if ROUTED in request.headers:
            await add_places(request, response)
        status, code = response.status, request.get(STREAM_ERROR)
        return response
    except ApiError as error:
        response = error_response(request.path, error, request[REQUEST_ID])
        status, code = response.status, error.code
        return response
    except asyncio.CancelledError:
        raise
    except ConnectionError:
        # The client has disconnected. The answer is never sent, but aiohttp would log an exception as an error.
        return web.Response(status=errors.CLIENT_LEFT)
    except Exception as error:
        structlog.get_logger().exception("a handler failed", id=request[REQUEST_ID], path=request.path)
        status, code = 500, "internal_error"
        failure = errors.internal(f"the server failed: {type(error).__name__}")
        return error_response(request.path, failure, request[REQUEST_ID])
    finally:
        record_request(request, status, code, time.monotonic() - started)


async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Check access and encoding, call the handler, and turn aiohttp's exceptions into ApiError."""
    request.app[GUARD].admit(request)
    check_encoding(request)
    if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
        return web.Response(status=204)
    try:
        return await handler(request)
    except RequestPayloadError as error:
        raise unreadable(error) from None
    except web.HTTPException as error:
        if error.status < 400:
            raise
        headers = {name: value for name, value in error.headers.items() if name == "Allow"}
        raise errors.from_status(error.status, describe(request, error), headers) from None


async def add_places(request: web.Request, response: web.StreamResponse) -> None:
    """Add where the states of the request and of its answer lie, for a router: as a header, or at a stream's end."""
    generation = request.get(GENERATION)
    if generation is None or not generation.members:
        return
    places = places_of(generation, request.app[DIGESTER])
    if not response.prepared:
        response.headers[HEADER] = places
    elif response.content_type == EVENT_STREAM:
        await response.write(PLACES + places.encode() + b"\n\n")


def describe(request: web.Request, error: web.HTTPException) -> str:
    """Return the error message for an HTTP exception that aiohttp raised."""
    match error.status:
        case 404:
            return f"there is nothing at {request.path}"
        case 405:
            return f"{request.path} does not take {request.method}"
        case 413:
            return f"the body is larger than {request.app[SERVER].config.body_limit} bytes (--body-limit)"
        case _:
            return error.text or error.reason


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Add the headers that every answer carries."""
    response.headers["Server"] = f"baton/{VERSION}"
    response.headers["x-request-id"] = request.get(REQUEST_ID, "-")
    if is_messages(request.path):
        response.headers["request-id"] = response.headers["x-request-id"]
    if TRACE in request:
        response.headers["x-trace-id"] = request[TRACE].trace_id
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers.update(cors_headers(request))


def record_request(request: web.Request, status: int, code: str | None, seconds: float) -> None:
    """Log one canonical line for an answered request, and record its metrics."""
    server = request.app[SERVER]
    resource = request.match_info.route.resource
    server.metrics.count_answer(resource.canonical if resource is not None else "unknown", status)
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
        server.record_end(generation, code or (str(status) if status >= 400 else None))
    log = structlog.get_logger()
    (log.debug if request.path in QUIET else log.info)("request", **line)
