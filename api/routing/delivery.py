"""Delivery of answers to clients. If the engine of a stream fails, another engine continues the stream."""

import asyncio
from dataclasses import replace

import aiohttp
import msgspec
import structlog
from aiohttp import web

from baton.api import errors
from baton.api.anthropic.errors import error_body, is_messages
from baton.api.anthropic.reply import frames as named_frames
from baton.api.connections.body import whole_body
from baton.api.errors import ApiError
from baton.api.events.frames import name_of
from baton.api.events.places import split_places
from baton.api.exchange import REQUEST_ID
from baton.api.parsing import RESUME
from baton.api.resuming import RESUMABLE, ROUTED, Resumption
from baton.api.routing.asking import Asking, read_asking
from baton.api.routing.bodies import ClientStream, begin
from baton.api.routing.counts import RouterCounts
from baton.api.routing.engines import Fleet
from baton.api.routing.forwarding import (
    HOP_BY_HOP,
    MOST_RETRIES,
    ClientCall,
    EngineStream,
    Forwarder,
    answered,
    passed_on,
)
from baton.api.routing.streams import StreamCopy
from baton.api.security import owner_of
from baton.api.sse import DONE, frames

RESPONSES = "/v1/responses"
LATER_S = 1.0  # the router waits this much longer than engines do, so that clients get the engine's own 504
LOST = "the engine was lost in the middle of the answer, and no other one can continue it"


class Delivery:
    """The part of a router that answers clients with the answers of engines."""

    def __init__(self, fleet: Fleet, forwarder: Forwarder, counts: RouterCounts, timeout: float) -> None:
        """timeout: --request-timeout. LATER_S after it the client gets a 504 if no engine has answered."""
        self._fleet, self._forwarder, self._counts, self._timeout = fleet, forwarder, counts, timeout

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer a request with an engine's answer. Raises ApiError 503 or 504 if no engine answers."""
        async with whole_body(request) as view_of_body:
            body = bytes(view_of_body)
            asking = read_asking(request.path, body, owner_of(request))
            headers = passed_on(request.headers, HOP_BY_HOP)
            headers[ROUTED] = "1"
            deadline = asyncio.get_running_loop().time() + self._timeout + LATER_S
            call = ClientCall(request.method, request.rel_url.raw_path_qs, headers, body, asking, deadline)
            result = await self._forwarder.begin(call)
            return result if isinstance(result, web.Response) else await self._deliver(request, call, result)

    async def _deliver(self, request: web.Request, call: ClientCall, stream: EngineStream) -> web.StreamResponse:
        """Pass a stream on to the client. If its engine fails, another engine continues it, or an error ends it."""
        first = stream.answer
        response = web.StreamResponse(status=first.status, reason=first.reason, headers=answered(first.headers))
        copy = StreamCopy() if RESUMABLE in first.headers else None
        try:
            with stream.view.closing_when_lost(first.close):
                client = await begin(response, request)
        except BaseException:
            first.close()  # else the engine would go on, and its connection would keep what arrives
            raise
        for left in reversed(range(1 + MOST_RETRIES)):
            try:
                await self._copy(stream, client, copy, call.asking)
                self._forwarder.learn(call.asking, copy.places if copy is not None else "")
                return response
            except (aiohttp.ClientError, TimeoutError) as error:
                self._fleet.doubt(stream.view, f"{type(error).__name__}: {error}")
            if copy is not None and copy.complete:
                return response
            if not left or copy is None or not copy.can_go_on or call.asking.bound:
                break
            structlog.get_logger().warning("another engine continues a stream", after=stream.view.name)
            again = await self._continue(call, copy.resumption)
            if again is None:
                break
            self._counts.continued.inc()
            if request.path == RESPONSES and copy.id:
                self._fleet.take_over(name_of(owner_of(request), copy.id), again.view)
            stream = again
            copy.begin_again()
        self._counts.interrupted.inc()
        client.write(interruption(request))
        return response

    async def _continue(self, call: ClientCall, resumption: Resumption | None) -> EngineStream | None:
        """Let another engine continue a stream. Return that engine's stream; None if no engine can continue.

        resumption: the part of the stream that the client has; None: the stream begins again.
        """
        if resumption is not None:
            field = f'{{"{RESUME}":'.encode() + msgspec.json.encode(resumption)
            call = replace(call, body=field + b"," + call.body.lstrip()[1:])
        log = structlog.get_logger()
        try:
            result = await self._forwarder.begin(call)
        except ApiError as error:
            log.warning("a stream cannot be continued", why=str(error))
            return None
        if isinstance(result, EngineStream) and RESUMABLE in result.answer.headers:
            return result
        if isinstance(result, EngineStream):
            result.answer.close()
        status = result.answer.status if isinstance(result, EngineStream) else result.status
        log.warning("a stream cannot be continued", why=f"status {status}")
        return None

    async def _copy(self, stream: EngineStream, client: ClientStream, copy: StreamCopy | None, asking: Asking) -> None:
        """Copy the events of a stream to the client.

        Raises aiohttp.ClientError if the engine fails before the end, or sends a comment that cannot be read.
        """

        def take(chunk: bytes) -> bool:
            if copy is not None:
                chunk = copy.take(chunk)
            else:
                chunk, places = split_places(chunk)
                self._forwarder.learn(asking, places)
            is_slow = bool(chunk) and client.write(chunk)
            if copy is not None and copy.fault:
                raise aiohttp.ClientPayloadError(copy.fault)
            return is_slow

        async with stream.answer as answer:
            with stream.view.closing_when_lost(answer.close):
                await stream.body.pass_on(take, client.caught_up)
        if copy is not None and (rest := copy.rest()):
            client.write(rest)


def interruption(request: web.Request) -> bytes:
    """Return the error event that ends an incomplete stream, in the format of the request's API."""
    error = errors.unavailable(LOST, "engine_lost")
    if is_messages(request.path):
        return named_frames([error_body(error, request[REQUEST_ID])])
    if request.path.startswith(RESPONSES):
        about = {"type": "error", "code": error.code, "message": error.message, "param": None}
        return b"event: error\ndata: " + msgspec.json.encode(about) + b"\n\n"
    return frames([error.body()]) + DONE
