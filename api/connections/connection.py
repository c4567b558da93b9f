"""One connection: everything is passed on to aiohttp's protocol, and watched on its way."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

from aiohttp import WSCloseCode, web

from baton.api.connections.frames import MaskCheck
from baton.api.errors import ApiError, unavailable

if TYPE_CHECKING:
    from baton.api.connections.registry import Connections

Phase: TypeAlias = Literal["new", "silent", "headers", "request", "websocket", "refused"]


class ClientConnection(asyncio.Protocol):
    """phase: what it is at, since the time `since` of the loop's clock.

    It holds the bytes that are on their way: `incoming`, that nobody has taken yet; the `body` that is being read;
    messages of a websocket that are `queued`; and `unsent`, which the client has not taken of its answers.
    """

    def __init__(self, connections: "Connections") -> None:
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._protocol: web.RequestHandler | None = None
        self._transport: asyncio.Transport | None = None
        self._masks: MaskCheck | None = None
        self._reading: asyncio.Timeout | None = None
        self._discarding = False
        self._refusal: ApiError | None = None
        self.given_up = False
        self.phase: Phase = "new"
        self.since = self._loop.time()
        self.heard = self.since
        self.taken = self.since
        self.held = self.incoming = self.body = self.queued = self.unsent = 0
        self._seen = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by class.
        self._protocol = self._connections.admit(self)
        if self._protocol is None:
            self._enter("refused")
            return
        self._enter("silent")
        self._protocol.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self.heard = self._loop.time()
        if self.phase == "refused" or self._protocol is None:
            self.answer(full())
            return
        if self._masks is not None and not self._masks.all_masked(data):
            self.close_websocket(WSCloseCode.PROTOCOL_ERROR)
            return
        if self.phase == "silent":
            self._enter("headers")
        if not self._discarding:
            self.hold(incoming=self.incoming + len(data))
        self._protocol.data_received(data)

    def pause_writing(self) -> None:
        self.count_unsent()
        if self._protocol is not None:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self.count_unsent()
        if self._protocol is not None:
            self._protocol.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._let_go()
        self._connections.leave(self, self._protocol)
        if self._protocol is not None:
            self._protocol.connection_lost(exc)

    @contextmanager
    def request(self) -> Iterator[None]:
        """While a request is answered. Its headers have been taken."""
        self._discarding, self._refusal = False, None
        self.hold(incoming=0)
        self._enter("request")
        try:
            yield
        finally:
            self.hold(incoming=0)
            self._enter("silent")

    @asynccontextmanager
    async def reading(self, seconds: float) -> AsyncIterator[None]:
        """While a body is read. Raises ApiError 408 when it takes longer, 503 when it has to be given up."""
        try:
            async with asyncio.timeout(seconds) as self._reading:
                yield
        except BaseException as error:
            self._discarding = True  # aiohttp reads on for a while and drops what comes.
            if isinstance(error, TimeoutError):
                raise self._refusal or too_slow("body", seconds) from None
            raise
        finally:
            self._reading = None

    def open_websocket(self) -> None:
        self._masks = MaskCheck()
        self.hold(incoming=0)
        self._enter("websocket")

    def hold(
        self,
        incoming: int | None = None,
        body: int | None = None,
        queued: int | None = None,
        unsent: int | None = None,
    ) -> None:
        """Note how many bytes of a kind are on their way. If the server has too many, who holds most gives up."""
        if self.given_up:
            return
        self.incoming = incoming if incoming is not None else self.incoming
        self.body = body if body is not None else self.body
        self.queued = queued if queued is not None else self.queued
        self.unsent = unsent if unsent is not None else self.unsent
        before, self.held = self.held, self.incoming + self.body + self.queued + self.unsent
        self._connections.count(self.held - before)

    def take(self, size: int) -> None:
        """A part of the body has been read: all that came has been taken."""
        self.hold(incoming=0, body=self.body + size)

    def count_unsent(self) -> int:
        """Bytes that the client has not taken. `taken` says when it last took some, or could begin to."""
        size = self._transport.get_write_buffer_size() if self._transport is not None else 0
        if size < self._seen or (size and not self._seen):
            self.taken = self._loop.time()
        self._seen = size
        self.hold(unsent=size)
        return size

    def is_deaf(self) -> bool:
        """Whether nothing is read from it, so that nobody would hear it leave."""
        return self._transport is not None and not self._transport.is_closing() and not self._transport.is_reading()

    def descriptor(self) -> int:
        """Of its socket; -1 if it has none any more."""
        socket = self._transport.get_extra_info("socket") if self._transport is not None else None
        return socket.fileno() if socket is not None else -1

    def give_up(self) -> None:
        """Let go of all bytes: a body is refused, anything else is cut off."""
        if self._reading is not None:
            self._discarding, self._refusal = True, too_much()
            self.hold(incoming=0, body=0)
            self._reading.reschedule(self._loop.time())
        elif self.phase == "websocket" and not self.unsent:
            self.close_websocket(WSCloseCode.TRY_AGAIN_LATER)
        else:
            self.abort()

    def close_websocket(self, code: WSCloseCode) -> None:
        """Say why in a frame, whatever else is being sent, and hang up."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"\x88\x02" + int(code).to_bytes(2, "big"))
            self._transport.close()
            self._enter("refused")
        self._let_go()

    def answer(self, error: ApiError) -> None:
        """Answer in place of the application, once. The client has a moment to read it before `sweep` hangs up."""
        if self._transport is not None and not self.given_up:
            self._transport.write(plain_answer(error))
            if self._transport.can_write_eof():
                self._transport.write_eof()
            self._enter("refused")
        self._let_go()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        self._let_go()

    def _let_go(self) -> None:
        self.hold(0, 0, 0, 0)
        self.given_up = True

    def _enter(self, phase: Phase) -> None:
        if self.given_up:
            return  # Its handler ends later than it does.
        self.phase, self.since = phase, self._loop.time()
        self._connections.moved(self)


def full() -> ApiError:
    return unavailable("the server has as many connections as it can", "too_many_connections")


def too_much() -> ApiError:
    message = "too many bytes are on their way to the server and from it, and most of them here"
    return unavailable(message, "too_many_bytes")


def too_slow(what: str, seconds: float) -> ApiError:
    return ApiError(408, f"the {what} did not come within {seconds:g} s", "timeout_error", code=f"{what}_timeout")


def plain_answer(error: ApiError) -> bytes:
    body = error.encode()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"}
    lines = [f"{name}: {value}" for name, value in (headers | error.headers).items()]
    return "\r\n".join([f"HTTP/1.1 {error.status} {error.code}", *lines, "", ""]).encode() + body
