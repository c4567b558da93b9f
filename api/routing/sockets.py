"""Websockets through the router: each message goes to the engine that has what it continues."""

import asyncio
from contextlib import suppress

import aiohttp
from aiohttp import WSMsgType, web

from baton.api.config import Config
from baton.api.errors import ApiError, websocket_event
from baton.api.routing.asking import read_asking
from baton.api.routing.engines import EngineView, Fleet
from baton.api.routing.forwarding import HOP_BY_HOP, Forwarder, passed_on
from baton.api.security import SUBPROTOCOL, owner_of

# Headers of a websocket's request that belong to one connection.
OF_SOCKETS = HOP_BY_HOP | {
    "sec-websocket-key", "sec-websocket-version", "sec-websocket-extensions", "sec-websocket-protocol",
}  # fmt: skip


class SocketForwarder:
    """Passes websockets on. A client has one websocket, and the router one to each engine that answers its messages."""

    def __init__(self, fleet: Fleet, http: aiohttp.ClientSession, forwarder: Forwarder, config: Config) -> None:
        self._fleet, self._http, self._forwarder, self._limit = fleet, http, forwarder, config.body_limit

    async def answer(self, request: web.Request) -> web.WebSocketResponse:
        """Serve a client's websocket until one side closes it."""
        client = web.WebSocketResponse(max_msg_size=self._limit, protocols=(SUBPROTOCOL,), autoping=True)
        await client.prepare(request)
        engines: dict[int, aiohttp.ClientWebSocketResponse] = {}
        pumps: list[asyncio.Task[None]] = []
        try:
            async for message in client:
                if message.type not in (WSMsgType.TEXT, WSMsgType.BINARY):
                    continue
                data = message.data.encode() if isinstance(message.data, str) else message.data
                try:
                    view = await self._engine(request, data, engines)
                except ApiError as error:
                    await client.send_json(websocket_event(error))
                    continue
                if view.number not in engines:
                    engines[view.number] = await self._connect(request, view)
                    pumps.append(asyncio.create_task(pump(engines[view.number], client)))
                await engines[view.number].send_str(data.decode())
        finally:
            for task in pumps:
                task.cancel()
            for socket in engines.values():
                with suppress(aiohttp.ClientError, ConnectionError):
                    await socket.close()
        return client

    async def _engine(
        self, request: web.Request, data: bytes, engines: dict[int, aiohttp.ClientWebSocketResponse]
    ) -> EngineView:
        """Return the engine for a message: where it is bound to, else one that has answered here, else the best one."""
        asking = read_asking(request.path, data, owner_of(request))
        if asking.bound or not engines:
            view, sent = await self._forwarder.pick(asking)
            if sent is not None:
                self._fleet.engines.answered(sent)
            return view
        return self._fleet[next(reversed(engines))]

    async def _connect(self, request: web.Request, view: EngineView) -> aiohttp.ClientWebSocketResponse:
        headers = passed_on(request.headers, OF_SOCKETS)
        url = f"{view.url}{request.path_qs}"
        return await self._http.ws_connect(url, headers=headers, protocols=(SUBPROTOCOL,), max_msg_size=0)


async def pump(source: aiohttp.ClientWebSocketResponse, target: web.WebSocketResponse) -> None:
    """Pass an engine's messages on to the client; close the client's websocket when the engine has closed its own."""
    async for message in source:
        if message.type is WSMsgType.TEXT:
            await target.send_str(message.data)
        elif message.type is WSMsgType.BINARY:
            await target.send_bytes(message.data)
    await target.close(code=source.close_code or 1001)
