"""Websockets through the router: each message goes to the engine that has the response it continues."""

import asyncio
from collections import Counter
from collections.abc import Coroutine
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import aiohttp
import msgspec
from aiohttp import WSCloseCode, WSMsgType, web
from msgspec import Struct

from baton.api import errors
from baton.api.config import Config
from baton.api.connections.registry import CONNECTIONS
from baton.api.connections.sockets import RECEIVED, Socket
from baton.api.errors import ApiError, websocket_event
from baton.api.events.frames import name_of
from baton.api.parsing import read_event, read_stream_id
from baton.api.routing.asking import read_asking
from baton.api.routing.engines import EngineView, Fleet
from baton.api.routing.forwarding import HOP_BY_HOP, Forwarder, passed_on
from baton.api.security import SUBPROTOCOL, owner_of, subprotocols

# Headers of a websocket's handshake that are not forwarded: they concern one connection.
OF_SOCKETS = HOP_BY_HOP | {
    "sec-websocket-key", "sec-websocket-version", "sec-websocket-extensions", "sec-websocket-protocol",
}  # fmt: skip
BEGINNINGS = ("response.create", "response.resume")
ENDS = ("response.completed", "response.failed", "response.incomplete", "error")
OTHER_ERRORS = ((400, "response_not_found"), (400, "unknown_event_type"))
"""Status and code of the errors that answer messages which begin no response."""
MOST_STREAMS = 256  # most streams whose latest response is remembered; more than an engine's MAX_LANES
LOST = "the engine was lost in the middle of the response"


class MadeResponse(Struct):
    """The response in an event."""

    id: str = ""


class SocketError(Struct):
    """The error in an event."""

    code: str | None = None


class SocketEvent(Struct):
    """The fields of an event that a router reads."""

    type: str = ""
    stream_id: str | None = None
    response: MadeResponse | None = None
    status: int = 0
    error: SocketError | None = None

    @property
    def ends_response(self) -> bool:
        """Whether the event ends a response. Some errors do not, such as that of a cancellation that comes too late."""
        if self.type == "error" and self.error is not None:
            return (self.status, self.error.code) not in OTHER_ERRORS
        return self.type in ENDS


EVENTS = msgspec.json.Decoder(SocketEvent)


class Sockets:
    """The part of a router that forwards websockets.

    For each client's websocket the router has one websocket to each engine that answers messages of this client.
    """

    def __init__(self, fleet: Fleet, http: aiohttp.ClientSession, forwarder: Forwarder, config: Config) -> None:
        self._fleet, self._http, self._forwarder, self._config = fleet, http, forwarder, config
        self._open = set[Socket]()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Serve a client's websocket until it is closed. If the engine refuses the handshake, so does the router."""
        client = Socket(SUBPROTOCOL, self._config.body_limit, heartbeat=self._config.ping_interval)
        if not client.can_prepare(request).ok:
            raise errors.upgrade_required()
        relay = ClientSocket(request, client, self._http)
        try:
            await relay.connect(await self._engine(request, b""))
        except aiohttp.WSServerHandshakeError as error:
            raise errors.from_status(error.status, error.message) from None
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise lost(error) from None
        try:
            await self._serve(request, client, relay)
        finally:
            self._open.discard(client)
            await relay.close()
        return client

    async def _serve(self, request: web.Request, client: Socket, relay: "ClientSocket") -> None:
        """Forward the client's messages. Each counts as in flight until its engine has it."""
        connection = request.app[CONNECTIONS].of(request)
        connection.open_websocket(client.forget)
        await client.prepare(request)
        self._open.add(client)
        async for message in client:
            if message.type not in RECEIVED:
                continue
            size = connection.take_message()
            try:
                if message.type is WSMsgType.PING:
                    await client.pong(message.data)
                elif message.type is not WSMsgType.PONG:
                    await self._pass_on(relay, request, message.data)
            finally:
                connection.end_message(size)
            del message  # It may be large: do not keep it while waiting for the next one.

    async def close(self) -> None:
        """Close every websocket, because the router is shutting down."""
        for client in list(self._open):
            await client.close(code=WSCloseCode.GOING_AWAY, message=b"the server is shutting down")

    async def _pass_on(self, relay: "ClientSocket", request: web.Request, message: str | bytes) -> None:
        """Forward a message, or answer it with an error."""
        data = message.encode() if isinstance(message, str) else message
        stream_id = None
        try:
            event = read_event(data)
            stream_id = read_stream_id(event)
            asking = read_asking(request.path, data, owner_of(request))
            begins = event.get("type") in BEGINNINGS
            view = relay.maker(asking.bound, begins) if asking.bound else relay.next_for(stream_id)
            if view is None:
                view = await self._engine(request, data)
            await relay.send(view, data, event.get("type"), stream_id)
        except ApiError as error:
            await relay.fail(stream_id, error)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            await relay.fail(stream_id, lost(error))

    async def _engine(self, request: web.Request, data: bytes) -> EngineView:
        """Return the engine for a message: the one that it is bound to, or else the best one."""
        view, sent = await self._forwarder.pick(read_asking(request.path, data, owner_of(request)))
        if sent is not None:
            self._fleet.engines.answered(sent)
        return view


@dataclass(eq=False, slots=True)
class EngineSocket:
    """The websocket to an engine."""

    socket: aiohttp.ClientWebSocketResponse
    open: Counter[str | None] = field(default_factory=Counter)  # by stream_id: number of responses that have not ended
    made: dict[str | None, str] = field(default_factory=dict)  # by stream_id: name of the latest response

    def note_sent(self, type: object, stream_id: str | None) -> None:
        """Count the response that a client's event begins, if it begins one."""
        if type in BEGINNINGS:
            self.open[stream_id] += 1

    def note_received(self, event: SocketEvent) -> None:
        """Count a response as ended if an event of the engine ends it."""
        if not event.ends_response or not self.open[event.stream_id]:
            return
        self.open[event.stream_id] -= 1
        if not self.open[event.stream_id]:
            del self.open[event.stream_id]

    def note_made(self, stream_id: str | None, name: str) -> None:
        """Note the latest response of a stream. Streams beyond MOST_STREAMS are forgotten, the oldest first."""
        self.made[stream_id] = name
        if len(self.made) > MOST_STREAMS:
            del self.made[next(iter(self.made))]


class ClientSocket:
    """A client's websocket, and the websockets to the engines that answer its messages."""

    def __init__(self, request: web.Request, client: web.WebSocketResponse, http: aiohttp.ClientSession) -> None:
        self._request, self._client, self._http = request, client, http
        self._engines: dict[EngineView, EngineSocket] = {}  # in order of use, the last used one last
        self._tasks = set[asyncio.Task[object]]()

    @property
    def latest(self) -> EngineView | None:
        """The engine that got the latest message, if it still takes requests."""
        view = next(reversed(self._engines), None)
        return view if view is not None and view.takes_requests else None

    def next_for(self, stream_id: str | None) -> EngineView | None:
        """Return the engine for a message that continues no response.

        It is the engine with an open response of the same stream, even a removed one: that response comes first, and
        the message may cancel it. Without one it is `latest`.
        """
        return next((view for view, engine in self._engines.items() if engine.open[stream_id] > 0), self.latest)

    def maker(self, name: str, begins: bool) -> EngineView | None:
        """Return the engine that made a response for this websocket, and may keep it for this websocket alone.

        begins: whether the message begins another response, which no removed engine gets
        """
        views = (view for view, engine in self._engines.items() if name in engine.made.values())
        return next((view for view in views if not (begins and view.phase == "removed")), None)

    async def connect(self, view: EngineView) -> None:
        """Connect to an engine. Raises aiohttp.ClientError if it does not take the websocket."""
        headers, url = passed_on(self._request.headers, OF_SOCKETS), f"{view.url}{self._request.path_qs}"
        offered = subprotocols(self._request) or [SUBPROTOCOL]  # one of them may hold the API key
        with view.unless_lost():
            socket = await self._http.ws_connect(url, headers=headers, protocols=offered, max_msg_size=0)
        engine = self._engines[view] = EngineSocket(socket)
        callbacks = ExitStack()  # Entered before the task begins, because the engine may be removed before.
        callbacks.enter_context(view.closing_when_lost(lambda: self._start(socket.close())))
        callbacks.enter_context(view.leaving_when_removed(lambda: self._leave(view, engine)))
        self._start(self._pump(view, engine)).add_done_callback(lambda _: callbacks.close())

    async def send(self, view: EngineView, data: bytes, type: object, stream_id: str | None) -> None:
        """Send a client's event to an engine.

        Raises aiohttp.ClientError, but not if the engine is lost while it is sent an event that begins a response:
        `_pump` ends that response with an error, as all others.
        """
        if view not in self._engines:
            await self.connect(view)
        engine = self._engines[view] = self._engines.pop(view)
        engine.note_sent(type, stream_id)
        try:
            await engine.socket.send_str(data.decode())
        except (aiohttp.ClientError, OSError):
            if type not in BEGINNINGS:
                raise

    async def fail(self, stream_id: str | None, error: ApiError) -> None:
        """Send an error to the client."""
        named = {"stream_id": stream_id} if stream_id is not None else {}
        await self._client.send_json(websocket_event(error) | named)

    async def close(self) -> None:
        """Close the connections to engines, because the client has left."""
        for engine in list(self._engines.values()):
            with suppress(aiohttp.ClientError, ConnectionError):
                await engine.socket.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, work: Coroutine[object, object, object]) -> asyncio.Task[object]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _leave(self, view: EngineView, engine: EngineSocket) -> None:
        """Close the websocket to an engine if the engine has been removed, and its responses here have ended."""
        if view.phase == "removed" and not engine.open:
            self._engines.pop(view, None)
            self._start(engine.socket.close())

    async def _pump(self, view: EngineView, engine: EngineSocket) -> None:
        """Forward an engine's messages. If it is lost or closes the websocket, end its open responses with an error."""
        with suppress(ConnectionError):
            self._leave(view, engine)
            async for message in engine.socket:
                if message.type is not WSMsgType.TEXT:
                    break  # The engine has sent something that cannot be read.
                event = event_of(message.data)
                if event.response is not None:
                    engine.note_made(event.stream_id, name_of(owner_of(self._request), event.response.id))
                engine.note_received(event)
                await self._client.send_str(message.data)
                self._leave(view, engine)
            self._engines.pop(view, None)
            for stream_id in engine.open.elements():
                await self.fail(stream_id, errors.unavailable(LOST, "engine_lost"))
        await engine.socket.close()


def lost(error: Exception) -> ApiError:
    """Return the ApiError 503 for an engine that does not answer."""
    return errors.unavailable(f"the engine did not answer: {error}", "engine_lost")


def event_of(data: str | bytes) -> SocketEvent:
    """Decode an engine's event. Return an empty one if it cannot be decoded."""
    try:
        return EVENTS.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return SocketEvent()
