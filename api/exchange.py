"""Helpers of handlers for one HTTP request: ids, values for the log line, submission to the ring, JSON answers."""

import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from baton.actors.requests import Request
from baton.api import errors
from baton.api.errors import ApiError
from baton.api.generation.outputs import Generation
from baton.api.generation.request_context import RequestContext, TraceContext
from baton.api.parsing import read_object
from baton.api.resuming import Earlier, read_resumption, resumed
from baton.api.security import flow_of, host_name, owner_of
from baton.api.server import SERVER

GENERATION: web.RequestKey[Generation] = web.RequestKey("generation", Generation)
REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)
TRACE: web.RequestKey[TraceContext] = web.RequestKey("trace", TraceContext)
STREAM_ERROR: web.RequestKey[str] = web.RequestKey("stream_error", str)  # code of an error inside the answer


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


async def read_body(request: web.Request) -> dict[str, Any]:
    """Read the body of a request that needs the model. Raises ApiError, which is 503 if the model is not ready."""
    body = await read_object(request)
    request.app[SERVER].ready()
    return body


def submit(request: web.Request, requests: Sequence[Request]) -> Generation:
    """Submit requests to the ring. Read the generation in a `with` block. Raises ApiError 400 or 503."""
    check_batch(request, len(requests))
    server, resumption = request.app[SERVER], read_resumption(request)
    earlier: Sequence[Earlier] = ()
    if resumption is not None:
        requests, earlier = resumed(server.loaded(), requests, resumption)
    generation = server.gateway.submit(requests, request_context(request), earlier)
    request[GENERATION] = generation
    return generation


def check_batch(request: web.Request, sequences: int) -> None:
    """Raise ApiError 400 if there are more sequences than can run or wait at once. Call this before preparing each."""
    server = request.app[SERVER]
    most = server.loaded().max_running + server.config.max_queue
    if sequences > most:
        raise errors.bad_request(
            f"{sequences} sequences in one request: at most {most} can run or wait at once", code="batch_too_large"
        )


def salt_of(request: web.Request, client_salt: str = "") -> str:
    """Return the cache salt of a request. Prompts under different salts share no states.

    Each API key has its own salts, unless --share-cache is set.

    client_salt: the salt in the body of the request, which separates prompts further.
    """
    owner = owner_of(request)
    return f"{owner.hex()}/{client_salt}" if owner and not request.app[SERVER].config.share_cache else client_salt


def ring_id(request: web.Request, id: str) -> str:
    """Return the ring's id for a request whose client chose `id`. Requests of other API keys never get the same id."""
    owner = owner_of(request)
    return f"{owner.hex()[:16]}/{id}" if owner else id


def request_context(request: web.Request) -> RequestContext:
    """Return the facts about an HTTP request that its generation keeps."""
    resource = request.match_info.route.resource
    return RequestContext(
        request[TRACE],
        resource.canonical if resource is not None else "",
        host_name(request.headers.get("Host", "")),
        request.app[SERVER].config.port,
        request.match_info.get("session", ""),
        flow_of(request),
    )


def answer_json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def answer_with_error(request: web.Request, answer: object, error: ApiError) -> web.Response:
    """Answer with a complete result plus the object and status of an error, such as a failed save of the session."""
    request[STREAM_ERROR] = error.code or error.type
    plain = msgspec.json.decode(msgspec.json.encode(answer))  # It may have parts that are JSON already.
    whole = plain | msgspec.to_builtins(error.body())
    response = answer_json(whole, error.status)
    response.headers.update(error.headers)
    return response
