"""One client connection, which passes all events to aiohttp's protocol and records its phase, times and bytes."""

import asyncio
import mmap
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Literal, Protocol, TypeAlias, cast

import msgspec
from aiohttp import WSCloseCode, web

from baton.api.connections.frames import FrameMeter, close_frame, text_frame
from baton.api.errors import ApiError, bad_request, unavailable, websocket_event

# The phases of a connection:
#     new ─▶ silent ─▶ headers ─▶ request ─▶ silent …      silent: between requests
#      │                           └─▶ websocket
#      └─▶ refused      too many connections, or an error was sent in place of the application; about to be closed
Phase: TypeAlias = Literal["new", "silent", "headers", "request", "websocket", "refused"]


class ConnectionSupervisor(Protocol):
    """The interface of `Connections` for a single connection, which asks for admission and reports its changes."""

    def admit(self, connection: "ClientConnection") -> web.RequestHandler | None: ...

    def leave(self, connection: "ClientConnection", protocol: web.RequestHandler | None) -> None: ...

    def moved(self, connection: "ClientConnection") -> None: ...

    def count(self, more: int) -> None: ...


class ClientConnection(asyncio.Protocol):
    """An asyncio protocol for one client's connection, which forwards to aiohttp's protocol."""

    def __init__(self, supervisor: ConnectionSupervisor) -> None:
        self._supervisor = supervisor
        self._loop = asyncio.get_running_loop()
        self._protocol: web.RequestHandler | None = None  # aiohttp's protocol; None if the connection is refused
        self._transport: asyncio.Transport | None = None
        self._frames: FrameMeter | None = None  # checks and measures the frames of a websocket; None for HTTP
        self._forget: Callable[[], None] | None = None  # drops what the handler of a websocket keeps of its messages
        self._reading: asyncio.Timeout | None = None  # the time limit while a body is read, else None
        self._space: mmap.mmap | None = None  # the memory of the body while it is read, else None
        self._discarding = False  # aiohttp drops arriving bytes, so they do not count as in flight
        self._cut_off = False  # `give_up` has ended the reading of the body
        self.given_up = False  # the connection is ending, and its bytes do not count as in flight any more
        self.phase: Phase = "new"
        # Times on the loop's clock:
        self.since = self._loop.time()  # when the connection entered its phase
        self.last_received = self.since
        self.last_read = self.since  # when the client last read a part of an answer, or an answer began to wait
        # Bytes in flight:
        self.held = 0  # sum of incoming, body, queued and unsent
        self.incoming = 0  # bytes received, not yet read by a handler; in a websocket, of incomplete messages too
        self.body = 0  # bytes of the request body that is being read or handled
        self.queued = 0  # bytes of websocket messages that wait for their turn, or are being answered
        self.unsent = 0  # bytes of answers that the client has not read yet
        self._unsent_before = 0  # the result of the last `count_unsent`

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class does not inherit from asyncio.Transport
        self._protocol = self._supervisor.admit(self)
        if self._protocol is None:
            self._enter("refused")
            return
        self._enter("silent")
        self._protocol.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self.last_received = self._loop.time()
        if self.phase == "refused" or self._protocol is None:
            self.answer(full())
            return
        # aiohttp accepts unmasked frames from clients, but RFC 6455 demands that the server closes the connection.
        if self._frames is not None and not self._frames.add(data):
            self.close_websocket(WSCloseCode.PROTOCOL_ERROR)
            return
        if self.phase == "silent":
            self._enter("headers")
        if not self._discarding:
            self.hold(incoming=self._frames.held if self._frames is not None else self.incoming + len(data))
        if not self.given_up:
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
        self._release()
        self._supervisor.leave(self, self._protocol)
        if self._protocol is not None:
            self._protocol.connection_lost(exc)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Keep the phase "request" during the context, which begins when aiohttp has parsed the headers."""
        self._discarding = self._cut_off = False
        self.hold(incoming=0)
        self._enter("request")
        try:
            yield
        finally:
            self.hold(incoming=0, body=0)
            self._enter("silent")

    @asynccontextmanager
    async def reading(self, seconds: float, space: mmap.mmap) -> AsyncIterator[None]:
        """Limit the time for reading a body inside this context. `take` writes the body to `space`.

        Raises ApiError 408 after `seconds`, and 503 if `give_up` is called meanwhile.
        """
        self._space = space
        try:
            async with asyncio.timeout(seconds) as self._reading:
                yield
            # `give_up` cannot stop a reader that has found the end of the body already.
            if self._cut_off:
                raise too_much()
        except BaseException as error:
            self._discarding = True  # aiohttp reads on for a while and drops the bytes.
            if isinstance(error, TimeoutError):
                raise too_much() if self._cut_off else too_slow("body", seconds) from None
            raise
        finally:
            self._reading = self._space = None

    def open_websocket(self, forget: Callable[[], None]) -> None:
        """Enter the phase "websocket", just before the handshake is answered. Raises ApiError 400.

        Every frame from the client must be masked. Each message counts as in flight from its first byte; the handler
        calls `take_message` when it receives one, and `end_message` when the message is answered.

        forget: called when the connection is given up; it must drop the messages that the handler keeps.
        """
        assert self._protocol is not None
        frames = FrameMeter()
        # A client may send frames before it has the answer. aiohttp keeps them until the handshake is over.
        if not frames.add(self._protocol._message_tail):
            raise bad_request("the frames of a websocket's client must be masked")
        self._frames, self._forget = frames, forget
        self.hold(incoming=frames.held)
        self._enter("websocket")

    def take_message(self) -> int:
        """Note that the handler has received the next message or control frame. Return how many bytes count for it."""
        assert self._frames is not None
        size = self._frames.take()
        self.hold(incoming=self._frames.held, queued=self.queued + size)
        return size

    def end_message(self, size: int) -> None:
        """Note that a message of `size` bytes, as counted by `take_message`, has been answered."""
        self.hold(queued=self.queued - size)

    def hold(
        self,
        incoming: int | None = None,
        body: int | None = None,
        queued: int | None = None,
        unsent: int | None = None,
    ) -> None:
        """Set how many bytes of each kind are in flight. None leaves a number unchanged.

        If too many bytes are then in flight on all connections, `Connections.count` ends the one with most bytes.
        """
        if self.given_up:
            return
        self.incoming = incoming if incoming is not None else self.incoming
        self.body = body if body is not None else self.body
        self.queued = queued if queued is not None else self.queued
        self.unsent = unsent if unsent is not None else self.unsent
        before, self.held = self.held, self.incoming + self.body + self.queued + self.unsent
        self._supervisor.count(self.held - before)

    def take(self, chunk: bytes) -> None:
        """Store the next bytes of the body. All received bytes have then been read by the handler."""
        if self._space is not None and not self._cut_off:
            self._space.write(chunk)
            self.hold(incoming=0, body=self.body + len(chunk))

    def count_unsent(self) -> int:
        """Update and return the number of unsent bytes. Set `last_read` if the client has read since the last call."""
        size = self._transport.get_write_buffer_size() if self._transport is not None else 0
        if size < self._unsent_before or (size and not self._unsent_before):
            self.last_read = self._loop.time()
        self._unsent_before = size
        self.hold(unsent=size)
        return size

    def is_deaf(self) -> bool:
        """Return whether reading is paused. While it is, asyncio does not notice that the client disconnects."""
        return self._transport is not None and not self._transport.is_closing() and not self._transport.is_reading()

    def descriptor(self) -> int:
        """Return the file descriptor of the connection's socket, or -1 if the socket is closed."""
        socket = self._transport.get_extra_info("socket") if self._transport is not None else None
        return socket.fileno() if socket is not None else -1

    def give_up(self) -> None:
        """End the connection, to release its bytes: answer 503 while a body is read, close a websocket, else abort.

        Bodies and messages are freed at once: the event loop may read many bytes of others before it runs the handler.
        """
        if self._reading is not None and self._space is not None:
            self._discarding = self._cut_off = True
            self._space.close()
            self.hold(incoming=0, body=0)
            self._reading.reschedule(self._loop.time())  # `reading` then raises the 503 at once.
        elif self.phase == "websocket" and self._transport is not None and not self._transport.get_write_buffer_size():
            # Nothing is unsent, so the error goes out at once.
            self.close_websocket(WSCloseCode.TRY_AGAIN_LATER, too_much())
        else:
            self.abort()

    def close_websocket(self, code: WSCloseCode, error: ApiError | None = None) -> None:
        """Send an event with `error`, and a close frame with `code`, bypassing aiohttp's writer.

        As with `answer`, the client has TO_READ_REFUSAL_S to read them. Meanwhile whatever it sends is read and
        dropped: if the socket were closed with unread bytes, the client's system could drop the frames.
        """
        if self._transport is not None and not self._transport.is_closing():
            event = text_frame(msgspec.json.encode(websocket_event(error))) if error is not None else b""
            self._end_with(self._transport, event + close_frame(code))
            if not self._transport.is_reading():
                self._transport.resume_reading()
        self._release()
        if self._protocol is not None:
            self._protocol.transport = None  # aiohttp would close it.
            self._protocol.connection_lost(None)  # aiohttp drops the message, and ignores the second call.

    def answer(self, error: ApiError) -> None:
        """Send an error in place of the application's answer, at most once.

        The client has TO_READ_REFUSAL_S to read it before `Connections.sweep` aborts the connection.
        """
        if self._transport is not None and not self.given_up:
            self._end_with(self._transport, plain_answer(error))
        self._release()

    def abort(self) -> None:
        """Close the connection at once; unsent bytes are lost."""
        if self._transport is not None:
            self._transport.abort()
        self._release()

    def _end_with(self, transport: asyncio.Transport, last: bytes) -> None:
        """Send the `last` bytes and the end of the stream."""
        transport.write(last)
        if transport.can_write_eof():
            transport.write_eof()
        self._enter("refused")

    def _release(self) -> None:
        """Count no bytes as in flight from now on, and drop the messages of a websocket."""
        self.hold(0, 0, 0, 0)
        self.given_up = True
        if self._forget is not None:
            self._forget()
            self._forget = None

    def _enter(self, phase: Phase) -> None:
        if self.given_up:
            return  # The handler of an aborted connection may end, and call this, after the connection.
        self.phase, self.since = phase, self._loop.time()
        self._supervisor.moved(self)


def full() -> ApiError:
    """Return the error for a connection beyond --max-connections."""
    return unavailable("the server has reached its maximum number of connections", "too_many_connections")


def too_much() -> ApiError:
    """Return the error for the connection with most bytes when more than --bytes-in-flight are in flight."""
    message = "the server has too many bytes in flight, and this connection holds most of them"
    return unavailable(message, "too_many_bytes")


def too_slow(what: str, seconds: float) -> ApiError:
    """Return the error for a request whose headers or body are late. what: "headers" or "body"."""
    return ApiError(408, f"the {what} did not arrive within {seconds:g} s", "timeout_error", code=f"{what}_timeout")


def plain_answer(error: ApiError) -> bytes:
    """Return a complete HTTP answer with an error, as bytes."""
    body = error.encode()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"}
    lines = [f"{name}: {value}" for name, value in (headers | error.headers).items()]
    return "\r\n".join([f"HTTP/1.1 {error.status} {error.code}", *lines, "", ""]).encode() + body
