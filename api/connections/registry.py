"""The set of all connections: it limits their number and bytes in flight, and ends those without progress."""

import asyncio
import select
from collections import Counter
from collections.abc import Callable, Sequence

import structlog
from aiohttp import web

from baton.api.config import Config
from baton.api.connections.connection import ClientConnection, too_slow
from baton.api.connections.limits import ConnectionLimits
from baton.api.connections.listening import Listening, listen
from baton.api.machine.heap import FreedMemory, find_trim

SWEEP_S = 1.0
TO_READ_REFUSAL_S = 2.0  # time for a client to read the 503 of a refused connection
BEGINNING_S = 1.0  # a request that began so recently may be complete, and its handler about to start
GONE = getattr(select, "POLLRDHUP", 0)  # poll event: the client has closed its side; Linux only


class Connections:
    """The set of all client connections."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.held = 0  # bytes in flight on all connections
        self.ended: Counter[str] = Counter()  # how many connections the server ended, by reason
        self._freed = FreedMemory()
        self._server: web.Server | None = None
        self._listening: Listening | None = None
        self._served: dict[web.RequestHandler, ClientConnection] = {}  # connections by aiohttp's protocol object
        self._silent: dict[ClientConnection, None] = {}  # connections without a request, longest silent first
        self._refused: set[ClientConnection] = set()  # refused connections whose clients may still read the error

    def __len__(self) -> int:
        return len(self._served)

    def of(self, request: web.BaseRequest) -> ClientConnection:
        """Return the connection on which a request arrived."""
        return self._served[request.protocol]

    async def listen(self, server: web.Server, config: Config) -> str:
        """Accept connections and have `server` serve them. Return its URL. Raises OSError and ConfigError."""
        self._listening = await listen(config, self.served_by(server))
        return self._listening.url

    def served_by(self, server: web.Server) -> Callable[[], ClientConnection]:
        """Return the factory that makes a ClientConnection for each new connection to `server`."""
        self._server = server
        return lambda: ClientConnection(self)

    async def close(self, app: web.Application) -> None:
        """Stop listening: accept no more connections. Existing connections stay open."""
        if self._listening is not None:
            self._listening.close()

    def admit(self, connection: ClientConnection) -> web.RequestHandler | None:
        """Return aiohttp's protocol for a new connection, or None if the connection is refused with 503.

        At the limit the new connection replaces the one that has been silent longest; if none is silent, it is refused.
        """
        assert self._server is not None
        if len(self._served) >= self.limits.connections and not self._end_silent():
            self._refuse(connection)
            return None
        protocol: web.RequestHandler = self._server()
        self._served[protocol] = connection
        return protocol

    def leave(self, connection: ClientConnection, protocol: web.RequestHandler | None) -> None:
        """Forget a connection that is closed."""
        self._refused.discard(connection)
        self._silent.pop(connection, None)
        if protocol is not None:
            self._served.pop(protocol, None)

    def moved(self, connection: ClientConnection) -> None:
        """Note that a connection has entered another phase."""
        self._silent.pop(connection, None)
        match connection.phase:
            case "silent" | "headers":
                self._silent[connection] = None
            case "refused":
                self._refused.add(connection)

    def count(self, more: int) -> None:
        """Change the bytes in flight by `more`. Above the limit, end connections, the one with most bytes first."""
        self.held += more
        self._freed.grow(self.held)
        while more > 0 and self.held > self.limits.held:
            self._end(max(self._served.values(), key=lambda connection: connection.held), "bytes")

    def _end_silent(self) -> bool:
        """End the connection that has been silent longest, to make room for another. Return False if there is none.

        Connections with unsent bytes, or with headers that have just begun to arrive, do not count as silent.
        """
        now = asyncio.get_running_loop().time()
        for connection in self._silent:
            is_beginning = connection.phase == "headers" and now - connection.since < BEGINNING_S
            if not is_beginning and connection.count_unsent() == 0:
                self._end(connection, "displaced")
                return True
        return False

    def _refuse(self, connection: ClientConnection) -> None:
        """Count a refused connection. Abort it at once if too many clients are still reading their 503."""
        self.ended["refused"] += 1
        if len(self._refused) >= self.limits.refusals:
            connection.abort()

    async def watch(self) -> None:
        """End connections without progress, and return their memory to the system, until cancelled."""
        limits, trim = self.limits, find_trim()
        shortest = min(limits.headers, limits.idle, limits.unread, limits.websocket)
        while True:
            await asyncio.sleep(min(SWEEP_S, shortest / 4))
            self.sweep(asyncio.get_running_loop().time())
            if self._freed.is_worth_a_trim(self.held):
                await asyncio.to_thread(trim)

    def sweep(self, now: float) -> None:
        """End connections that exceed a time limit, that their client has left, or that were refused a while ago."""
        connections = list(self._served.values())
        for connection in connections:
            if why := self._stuck(connection, now):
                self._end(connection, why)
        for connection in departed(connections):
            self._end(connection, "left")
        for connection in list(self._refused):
            if now - connection.since > TO_READ_REFUSAL_S:
                connection.abort()

    def _stuck(self, connection: ClientConnection, now: float) -> str | None:
        """Return the name of the time limit that a connection exceeds, or None."""
        unsent, limits = connection.count_unsent(), self.limits
        match connection.phase:
            case _ if unsent and now - connection.last_read > limits.unread:
                return "unread"
            case "silent" if not unsent and now - max(connection.since, connection.last_read) > limits.idle:
                return "idle"
            case "headers" if now - connection.since > limits.headers:
                return "headers"
            case "websocket" if now - connection.last_received > limits.websocket:
                return "websocket"
            case _:
                return None

    def _end(self, connection: ClientConnection, why: str) -> None:
        """End a connection in the way that fits the reason: give up its bytes, answer 408, or abort."""
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


def departed(connections: Sequence[ClientConnection]) -> list[ClientConnection]:
    """Return the connections whose client has disconnected while reading was paused: asyncio does not notice that."""
    if not hasattr(select, "poll"):
        return []
    deaf = {connection.descriptor(): connection for connection in connections if connection.is_deaf()}
    deaf.pop(-1, None)
    poll = select.poll()
    for descriptor in deaf:
        poll.register(descriptor, GONE)
    return [deaf[descriptor] for descriptor, _ in poll.poll(0)] if deaf else []


CONNECTIONS = web.AppKey("connections", Connections)
