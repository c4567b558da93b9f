"""All connections: how many there may be, how many bytes they may hold together, and what happens to the stuck ones."""

import asyncio
import select
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import structlog
from aiohttp import web

from baton.api.connections.connection import ClientConnection, too_slow
from baton.api.connections.limits import ConnectionLimits

BACKLOG = 1024
SWEEP_S = 1.0
TO_READ_REFUSAL_S = 2.0
BEGINNING_S = 1.0
GONE = getattr(select, "POLLRDHUP", 0)


class Connections:
    """held: bytes that are on their way on all of them. ended: how many were ended, by why."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.held = 0
        self.ended: Counter[str] = Counter()
        self._server: web.Server | None = None
        self._listening: asyncio.Server | None = None
        self._served: dict[web.RequestHandler, ClientConnection] = {}
        self._silent: dict[ClientConnection, None] = {}  # in the order in which they fell silent
        self._refused: set[ClientConnection] = set()

    def __len__(self) -> int:
        return len(self._served)

    def of(self, request: web.BaseRequest) -> ClientConnection:
        return self._served[request.protocol]

    async def listen(self, server: web.Server, host: str, port: int) -> tuple[Any, ...]:
        """Accept connections, for `server` to serve them. Returns the address. Raises OSError."""
        loop = asyncio.get_running_loop()
        make = self.served_by(server)
        self._listening = await loop.create_server(make, host, port, backlog=BACKLOG)
        return cast(tuple[Any, ...], self._listening.sockets[0].getsockname())

    def served_by(self, server: web.Server) -> Callable[[], ClientConnection]:
        """What makes the protocol of a connection."""
        self._server = server
        return lambda: ClientConnection(self)

    async def close(self, app: web.Application) -> None:
        """Accept no more."""
        if self._listening is not None:
            self._listening.close()

    def admit(self, connection: ClientConnection) -> web.RequestHandler | None:
        """The protocol that serves a new connection; None if it is to be told that there are too many.

        Where there are, it takes the place of the one that has been silent longest; if none is silent, it is refused.
        """
        assert self._server is not None
        if len(self._served) >= self.limits.connections and not self._end_silent():
            self._refuse(connection)
            return None
        protocol: web.RequestHandler = self._server()
        self._served[protocol] = connection
        return protocol

    def leave(self, connection: ClientConnection, protocol: web.RequestHandler | None) -> None:
        self._refused.discard(connection)
        self._silent.pop(connection, None)
        if protocol is not None:
            self._served.pop(protocol, None)

    def moved(self, connection: ClientConnection) -> None:
        """It has entered a phase."""
        self._silent.pop(connection, None)
        match connection.phase:
            case "silent" | "headers":
                self._silent[connection] = None
            case "refused":
                self._refused.add(connection)

    def count(self, more: int) -> None:
        """So many bytes more, or fewer, are held. While it is too much, who holds most gives up."""
        self.held += more
        while more > 0 and self.held > self.limits.held:
            self._end(max(self._served.values(), key=lambda connection: connection.held), "bytes")

    def _end_silent(self) -> bool:
        """Not one whose headers have just come: they may be whole, and its handler about to begin."""
        now = asyncio.get_running_loop().time()
        for connection in self._silent:
            is_beginning = connection.phase == "headers" and now - connection.since < BEGINNING_S
            if not is_beginning and connection.count_unsent() == 0:
                self._end(connection, "displaced")
                return True
        return False

    def _refuse(self, connection: ClientConnection) -> None:
        self.ended["refused"] += 1
        if len(self._refused) >= self.limits.refusals:
            connection.abort()

    async def watch(self) -> None:
        """Until cancelled: end those that make no progress."""
        limits = self.limits
        shortest = min(limits.headers, limits.idle, limits.unread, limits.websocket)
        while True:
            await asyncio.sleep(min(SWEEP_S, shortest / 4))
            self.sweep(asyncio.get_running_loop().time())

    def sweep(self, now: float) -> None:
        connections = list(self._served.values())
        for connection in connections:
            if why := self._stuck(connection, now):
                self._end(connection, why)
        for connection in left(connections):
            self._end(connection, "left")
        for connection in list(self._refused):
            if now - connection.since > TO_READ_REFUSAL_S:
                connection.abort()

    def _stuck(self, connection: ClientConnection, now: float) -> str | None:
        unsent, limits = connection.count_unsent(), self.limits
        match connection.phase:
            case _ if unsent and now - connection.taken > limits.unread:
                return "unread"
            case "silent" if not unsent and now - max(connection.since, connection.taken) > limits.idle:
                return "idle"
            case "headers" if now - connection.since > limits.headers:
                return "headers"
            case "websocket" if now - connection.heard > limits.websocket:
                return "websocket"
            case _:
                return None

    def _end(self, connection: ClientConnection, why: str) -> None:
        self.ended[why] += 1
        self._silent.pop(connection, None)
        structlog.get_logger().debug("a connection ends", why=why, phase=connection.phase, held=connection.held)
        match why:
            case "bytes":
                connection.give_up()
            case "headers":
                connection.answer(too_slow("headers", self.limits.headers))
            case _:
                connection.abort()


def left(connections: Sequence[ClientConnection]) -> list[ClientConnection]:
    """Those from which nothing is read at present, so that nobody heard that the client has left."""
    if not hasattr(select, "poll"):
        return []
    deaf = {connection.descriptor(): connection for connection in connections if connection.is_deaf()}
    deaf.pop(-1, None)
    poll = select.poll()
    for descriptor in deaf:
        poll.register(descriptor, GONE)
    return [deaf[descriptor] for descriptor, _ in poll.poll(0)] if deaf else []


CONNECTIONS = web.AppKey("connections", Connections)
