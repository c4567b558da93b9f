"""The router's application: the requests that it answers itself; engines answer all others."""

import ipaddress
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import structlog
from aiohttp import web
from aiohttp.web_protocol import RequestPayloadError
from msgspec import Struct
from yarl import URL

from baton.api import errors
from baton.api.anthropic.errors import error_response, is_messages
from baton.api.config import Config, ConfigError
from baton.api.connections.body import check_encoding, unreadable
from baton.api.connections.limits import router_limits
from baton.api.connections.registry import CONNECTIONS, Connections
from baton.api.errors import ApiError
from baton.api.exchange import REQUEST_ID, answer_json, new_id
from baton.api.generation.answers import milliseconds
from baton.api.parsing import convert, read_object
from baton.api.routing.engines import EngineView, Fleet
from baton.api.routing.router import ROUTER, Router
from baton.api.security import GUARD, Guard, cors_headers
from baton.api.version import VERSION

QUIET = frozenset({"/health", "/ready", "/metrics", "/debug/engines", "/debug/peers", "/debug/slots"})
TRACE_ID = "x-trace-id"  # the header in which an engine returns the trace id
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
routes = web.RouteTableDef()


def make_router(config: Config) -> web.Application:
    """Build the application. Raises ConfigError if API keys cannot be read, or an engine's URL is invalid."""
    if wrong := [url for url in config.engine if not is_engine_url(url)]:
        raise ConfigError(f"--engine: expected http://HOST:PORT or https://HOST:PORT, not {wrong[0]!r}")
    app = web.Application(middlewares=[middleware], client_max_size=config.body_limit)
    app[GUARD] = Guard(config)
    app[CONNECTIONS] = Connections(router_limits(config))

    async def running(app: web.Application) -> AsyncIterator[None]:
        app[ROUTER] = Router(config)
        yield
        await app[ROUTER].close()

    async def close_sockets(app: web.Application) -> None:
        await app[ROUTER].sockets.close()

    app.cleanup_ctx.append(running)
    app.on_shutdown.append(app[CONNECTIONS].close)
    app.on_shutdown.append(close_sockets)
    app.on_response_prepare.append(add_headers)
    app.add_routes(routes)
    return app


@routes.get("/health")
async def health(request: web.Request) -> web.Response:
    """Answer 200 as long as the process is alive."""
    return answer_json({"status": "ok"})


@routes.get("/ready")
async def ready(request: web.Request) -> web.Response:
    """Answer 200 if an engine takes requests."""
    router = request.app[ROUTER]
    if router.draining:
        raise errors.draining()
    if not any(view.takes_requests for view in router.fleet):
        raise router.fleet.refusal()
    return answer_json({"status": "ready"})


class EngineRequest(Struct, forbid_unknown_fields=True):
    """The body of POST and DELETE /debug/engines."""

    url: str


@routes.get("/debug/engines")
async def list_engines(request: web.Request) -> web.Response:
    """List the engines with their phase and load."""
    return answer_json([describe(request.app[ROUTER].fleet, view) for view in request.app[ROUTER].fleet])


@routes.post("/debug/engines")
async def add_engine(request: web.Request) -> web.Response:
    """Add an engine. It will read the requests of clients, so only the operator may add one."""
    check_operator(request)
    body = convert(await read_object(request), EngineRequest)
    if not is_engine_url(body.url):
        raise errors.bad_request(
            f"url: expected http://HOST:PORT or https://HOST:PORT, got {errors.shown(body.url)}", "url", "invalid_value"
        )
    fleet = request.app[ROUTER].fleet
    return answer_json(describe(fleet, fleet.add(body.url)))


@routes.delete("/debug/engines")
async def remove_engine(request: web.Request) -> web.Response:
    """Remove an engine. It gets no new requests, and those that it is answering go on."""
    check_operator(request)
    body, fleet = convert(await read_object(request), EngineRequest), request.app[ROUTER].fleet
    view = next((view for view in fleet if view.url == body.url.rstrip("/")), None)
    if view is None:
        raise ApiError(404, f"there is no engine {body.url}", "not_found_error", "url", "engine_not_found")
    fleet.remove(view)
    return answer_json({"url": view.url, "removed": True})


def is_engine_url(text: str) -> bool:
    """Return whether a text can be the URL of an engine: http or https, with a host."""
    try:
        url = URL(text)
    except ValueError:
        return False
    return url.scheme in ("http", "https") and bool(url.host)


def check_operator(request: web.Request) -> None:
    """Raise ApiError 403 unless the request has the first API key or, without keys, comes from this machine."""
    guard = request.app[GUARD]
    guard.check_operator(request)
    # A Unix socket has no remote address.
    is_local = not request.remote or ipaddress.ip_address(request.remote).is_loopback
    if not (guard.has_keys or is_local):
        raise errors.forbidden("without API keys only this machine may change the engines")


def describe(fleet: Fleet, view: EngineView) -> dict[str, object]:
    """Return the description of an engine in /debug/engines."""
    about = {"url": view.url, "name": view.name, "phase": view.phase, "why": view.why, "model": view.model}
    holds = {"states": fleet.index.count(view.number), "sessions_and_responses": len(view.names)}
    return {
        **about,
        "role": view.role,
        "boot": view.boot,
        "requests": view.requests,
        **holds,
        "load": msgspec.to_builtins(view.load),
    }


@routes.get("/metrics")
async def metrics(request: web.Request) -> web.Response:
    return await request.app[ROUTER].all_engines.metrics()


@routes.get("/v1/sessions")
async def list_sessions(request: web.Request) -> web.StreamResponse:
    return await request.app[ROUTER].all_engines.sessions(request)


@routes.get("/debug/slots")
@routes.get("/debug/peers")
async def list_of_all(request: web.Request) -> web.StreamResponse:
    return await request.app[ROUTER].all_engines.listed(request)


@routes.route("*", "/flush_cache")
@routes.post("/pause_generation")
@routes.post("/continue_generation")
@routes.post("/abort_request")
async def at_all_engines(request: web.Request) -> web.Response:
    return await request.app[ROUTER].all_engines.ask_all(request)


@routes.route("*", "/{path:.*}")
async def at_one_engine(request: web.Request) -> web.StreamResponse:
    router = request.app[ROUTER]
    if router.draining:
        raise errors.draining()
    if request.headers.get("Upgrade", "").lower() == "websocket":
        return await router.sockets.answer(request)
    return await router.delivery.answer(request)


@web.middleware
async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer a request, and write a line to the log."""
    request[REQUEST_ID] = new_id("req")
    started, status, router = time.monotonic(), errors.CLIENT_LEFT, request.app[ROUTER]
    about: dict[str, object] = {}
    try:
        with router.request(), request.app[CONNECTIONS].of(request).request():
            response = await answer(request, handler)
        status = response.status
        about = {"trace_id": response.headers[TRACE_ID]} if TRACE_ID in response.headers else {}
        return response
    finally:
        log = structlog.get_logger()
        line = {"id": request[REQUEST_ID], "endpoint": f"{request.method} {request.path}", "status": status, **about}
        (log.debug if request.path in QUIET else log.info)(
            "request", **line, total_ms=milliseconds(time.monotonic() - started)
        )


async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Check access, call the handler, and turn exceptions into error responses."""
    try:
        request.app[GUARD].admit(request)
        check_encoding(request)
        if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
            return web.Response(status=204)
        return await handler(request)
    except ApiError as error:
        failure = error
    except ConnectionError:
        return web.Response(status=errors.CLIENT_LEFT)
    except RequestPayloadError as error:
        failure = unreadable(error)
    except web.HTTPException as error:
        failure = errors.from_status(error.status, error.text or error.reason)
    except Exception as error:
        structlog.get_logger().exception("a handler failed", id=request[REQUEST_ID], path=request.path)
        failure = errors.internal(f"the router failed: {type(error).__name__}")
    return error_response(request.path, failure, request[REQUEST_ID])


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Add the headers that every answer carries, unless an engine has set them."""
    response.headers["Server"] = f"baton/{VERSION}"
    response.headers.setdefault("x-request-id", request.get(REQUEST_ID, "-"))
    if is_messages(request.path):
        response.headers.setdefault("request-id", response.headers["x-request-id"])
    response.headers.setdefault("X-Content-Type-Options", "nosniff")
    response.headers.update(cors_headers(request))
