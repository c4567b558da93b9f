"""GET /v1/responses as a websocket: the client sends `response.create` and gets the events of the response.

With `response.resume` the client asks for the events of a response that began on another socket. All responses with one
stream_id are a *lane*. The responses of a lane run one after another, and lanes run concurrently.
"""

import asyncio
import uuid
from collections import deque
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import msgspec
import structlog
from aiohttp import WSCloseCode, WSMessage, WSMsgType, web
from msgspec import Struct

from baton.api import errors
from baton.api.connections.registry import CONNECTIONS
from baton.api.connections.sockets import RECEIVED, Socket
from baton.api.errors import ApiError
from baton.api.exchange import REQUEST_ID
from baton.api.generation.fields import Count
from baton.api.parsing import convert, read_event, read_stream_id
from baton.api.responses.events import EventCursor
from baton.api.responses.items import Event
from baton.api.responses.request import read_request
from baton.api.responses.start import start_response
from baton.api.responses.store import RESPONSES, StoredResponse
from baton.api.security import SUBPROTOCOL, owner_of, subprotocols
from baton.api.server import SERVER, Server

routes = web.RouteTableDef()

OPEN_SOCKETS = web.AppKey("open_sockets", set[web.WebSocketResponse])
MAX_LANES = 64
MAX_WAITING = 16  # maximum waiting events from the client in one lane
MAX_UNANSWERED_PINGS = 8


@routes.get("/v1/responses", allow_head=False)
async def connect(request: web.Request) -> web.StreamResponse:
    """Open a websocket, and serve it until it is closed."""
    server = request.app[SERVER]
    server.ready()
    check_subprotocol(request)
    socket = Socket(SUBPROTOCOL, server.config.body_limit)
    if not socket.can_prepare(request).ok:
        raise errors.upgrade_required()
    connection = Connection(request, server, socket)
    await socket.prepare(request)
    request.app[OPEN_SOCKETS].add(socket)
    try:
        await connection.serve()
    finally:
        request.app[OPEN_SOCKETS].discard(socket)
    return socket


def check_subprotocol(request: web.Request) -> None:
    """Raise ApiError 400 if a client offers subprotocols, but not the one that this server speaks.

    Browsers send an API key as a subprotocol. The answer must name one of the offered subprotocols, but never the key.
    """
    offered = subprotocols(request)
    if offered and SUBPROTOCOL not in offered:
        message = f"Sec-WebSocket-Protocol must include {SUBPROTOCOL!r}, or be absent"
        raise errors.bad_request(message, code="unknown_subprotocol")


async def close_all(app: web.Application) -> None:
    """Close every websocket, because the server is shutting down."""
    sockets = app[OPEN_SOCKETS]
    for socket in list(sockets):
        await socket.close(code=WSCloseCode.GOING_AWAY, message=b"the server is shutting down")


class ResumeRequest(Struct, forbid_unknown_fields=True):
    """The fields of `response.resume`."""

    response_id: str
    starting_after: Count | None = None  # the number of the last event that the client has seen


class WaitingEvent(NamedTuple):
    """An event from the client that asks for a response."""

    kind: str
    fields: dict[str, Any]
    size: int  # bytes of its message, which count as in flight until the response is over


class Lane:
    """The responses of one stream_id, which run one after another."""

    def __init__(self) -> None:
        self.waiting: deque[WaitingEvent] = deque()
        self.task: asyncio.Task[None] | None = None
        self.running: str | None = None  # id of the running response
        self.cancelled = False  # the response that begins next is aborted as soon as it runs
        self.latest: StoredResponse | None = None  # last response; the next may continue it, stored or not
        self.name = uuid.uuid4().hex  # under which `latest` counts in the store


class Connection:
    """One websocket. Each of its lanes runs one response at a time; different lanes run concurrently."""

    def __init__(self, request: web.Request, server: Server, socket: Socket) -> None:
        self._request = request
        self._server = server
        self._responses = request.app[RESPONSES]
        self._socket = socket
        self._owner = owner_of(request)
        self._connection = request.app[CONNECTIONS].of(request)
        self._log = structlog.get_logger().bind(id=request[REQUEST_ID])
        self._lanes: dict[str | None, Lane] = {}
        self._unanswered = 0
        self._connection.open_websocket(self._forget)

    async def serve(self) -> None:
        """Serve the client until it disconnects. Then cancel the lanes' tasks, which aborts foreground responses."""
        pinging = asyncio.ensure_future(self._ping(self._server.config.ping_interval))
        try:
            async for message in self._socket:
                self._unanswered = 0
                if message.type in RECEIVED:
                    await self._handle(message)
                del message  # It may be large, and the next one may be far off.
        finally:
            tasks = [pinging, *(lane.task for lane in self._lanes.values() if lane.task is not None)]
            pinging.cancel()
            self._end_lanes()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self) -> None:
        """Drop all messages, because the connection is given up."""
        self._socket.forget()
        self._end_lanes()

    def _end_lanes(self) -> None:
        """Drop the waiting events and the last responses, and cancel the lanes' tasks."""
        for lane in self._lanes.values():
            while lane.waiting:
                self._connection.end_message(lane.waiting.popleft().size)
            if lane.task is not None:
                lane.task.cancel()
            self._forget_last(lane)
            lane.latest = None

    async def _ping(self, interval: float) -> None:
        """Ping the client at intervals. Disconnect a client that waits for a response but neither answers nor reads."""
        while not self._socket.closed:
            await asyncio.sleep(interval)
            owed = any(lane.task is not None and not lane.task.done() for lane in self._lanes.values())
            self._unanswered = self._unanswered + 1 if owed else 0
            if self._unanswered > MAX_UNANSWERED_PINGS:
                self._connection.abort()
            else:
                await self._socket.ping()

    async def _handle(self, message: WSMessage) -> None:
        """Handle a message or control frame. It ends here, unless it asks for a response and waits in a lane."""
        size, waits = self._connection.take_message(), False
        try:
            if message.type is WSMsgType.PING:
                await self._socket.pong(message.data)
            elif message.type is not WSMsgType.PONG:
                waits = await self._receive(message.data, size)
        finally:
            if not waits:
                self._connection.end_message(size)

    async def _receive(self, data: str | bytes, size: int) -> bool:
        """Handle an event. Return whether it asks for a response, and waits for it now."""
        stream_id = None
        try:
            event = read_event(data)
            stream_id = read_stream_id(event)
            match event.pop("type", None):
                case "response.create" | "response.resume" as kind:
                    self._enqueue(stream_id, WaitingEvent(kind, event, size))
                    return True
                case "response.cancel":
                    self._cancel(stream_id, event.get("response_id"))
                case kind:
                    raise errors.bad_request(f"unknown event type {errors.shown(kind)}", "type", "unknown_event_type")
        except ApiError as error:
            await self._send_error(stream_id, error)
        return False

    def _enqueue(self, stream_id: str | None, event: WaitingEvent) -> None:
        if stream_id not in self._lanes and len(self._lanes) >= MAX_LANES:
            self._drop_idle_lanes()
        lane = self._lanes.setdefault(stream_id, Lane())
        if len(lane.waiting) >= MAX_WAITING:
            raise errors.queue_full(f"this stream has {MAX_WAITING} waiting responses already")
        lane.waiting.append(event)
        if lane.task is None or lane.task.done():
            lane.cancelled = False
            lane.task = asyncio.ensure_future(self._run(stream_id, lane))

    def _drop_idle_lanes(self) -> None:
        for id, lane in list(self._lanes.items()):
            if lane.task is None or lane.task.done():
                self._forget_last(lane)
                del self._lanes[id]
        if len(self._lanes) >= MAX_LANES:
            raise errors.queue_full(f"this connection has {MAX_LANES} busy streams already")

    def _cancel(self, stream_id: str | None, response_id: object) -> None:
        """Abort the response `response_id`, or else the lane's first one. The last event is `response.incomplete`."""
        running = {lane.running for lane in self._lanes.values()} - {None}
        lane = self._lanes.get(stream_id, Lane())
        if response_id is None and lane.running is None and lane.task is not None and not lane.task.done():
            lane.cancelled = True
            return
        id = response_id if response_id is not None else lane.running
        if not (isinstance(id, str) and (id in running or self._runs_elsewhere(id))):
            raise errors.bad_request("response_id: no such response is running", "response_id", "response_not_found")
        self._server.gateway.abort(id)

    def _runs_elsewhere(self, id: str) -> bool:
        """Return whether the response runs, in the background or for another connection, for the same owner."""
        stored = self._responses.find(self._owner, id)
        return stored is not None and stored.running

    async def _run(self, stream_id: str | None, lane: Lane) -> None:
        with suppress(ConnectionError):
            while lane.waiting:
                await self._respond_next(stream_id, lane)

    async def _respond_next(self, stream_id: str | None, lane: Lane) -> None:
        """Run the response that the lane's first event asks for. Raises ConnectionError if the client has left.

        The event counts as in flight until the end of this call, which is also the last that refers to it.
        """
        event = lane.waiting.popleft()
        try:
            await self._respond(stream_id, lane, event)
        except ApiError as error:
            await self._send_error(stream_id, error)
        except ConnectionError:
            raise
        except Exception:
            self._log.exception("a response failed")
            await self._send_error(stream_id, errors.internal("the server failed"))
        finally:
            self._connection.end_message(event.size)

    async def _respond(self, stream_id: str | None, lane: Lane, event: WaitingEvent) -> None:
        fields = {name: value for name, value in event.fields.items() if value is not None and name != "stream"}
        try:
            await (self._resume if event.kind == "response.resume" else self._create)(stream_id, lane, fields)
        finally:
            lane.running, lane.cancelled = None, False
            if lane.latest is not None and lane.latest.finished.is_set():
                self._remember(lane, lane.latest)

    def _remember(self, lane: Lane, response: StoredResponse) -> None:
        """Count the last response of a lane, in place of the one before."""
        self._responses.forget(self._owner, lane.name)
        self._responses.remember(self._owner, lane.name, response, partial(self._forget_last, lane))

    def _forget_last(self, lane: Lane) -> None:
        """Forget the last response of a lane that has ended, which then can be continued only if it is stored."""
        if lane.latest is not None and not lane.latest.running:
            lane.latest = None
        self._responses.forget(self._owner, lane.name)

    async def _create(self, stream_id: str | None, lane: Lane, fields: dict[str, Any]) -> None:
        body = read_request(fields)
        with await start_response(self._request, body, lane.latest) as run:
            self._run_in(lane, run.response)
            if not body.background:
                await run.wait_begun()
            await self._send_all(stream_id, EventCursor(run.transcript))

    async def _resume(self, stream_id: str | None, lane: Lane, fields: dict[str, Any]) -> None:
        body = convert(fields, ResumeRequest)
        response = self._responses.get(self._owner, body.response_id)
        reader = EventCursor(response.transcript, body.starting_after if body.starting_after is not None else -1)
        self._run_in(lane, response)
        await self._send_all(stream_id, reader)

    def _run_in(self, lane: Lane, response: StoredResponse) -> None:
        """Note that a lane's response runs. Abort it if it was cancelled before."""
        lane.running, lane.latest = response.id, response
        if lane.cancelled:
            self._server.gateway.abort(response.id)

    async def _send_all(self, stream_id: str | None, reader: EventCursor) -> None:
        while not reader.over:
            for event in await reader.next():
                await self._send(stream_id, event)

    async def _send_error(self, stream_id: str | None, error: ApiError) -> None:
        await self._send(stream_id, errors.websocket_event(error))

    async def _send(self, stream_id: str | None, event: Event) -> None:
        """Send an event, waiting until the client reads. Text that is generated meanwhile becomes a single delta."""
        if stream_id is not None:
            event["stream_id"] = stream_id
        await self._socket.send_str(msgspec.json.encode(event).decode())
        self._unanswered = 0
