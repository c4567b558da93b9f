"""The bodies of streams, which callbacks pass from an engine's connection to a client's.

With aiohttp alone, each chunk would go through its queue, a task and its writer, which costs more than the rest of the
router's work. So the connection to an engine parses the chunks of a stream itself, and hands each to a function that
writes it to the client's transport. aiohttp does everything else about connections.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.client_proto import ResponseHandler

KEPT_S = 60.0  # how long an idle connection to an engine is kept
LONGEST_HEAD = 2**16  # maximum bytes of an answer's status and headers
MOST_UNREAD = 2**16  # if more bytes of a body than these have arrived before `pass_on`, reading pauses until then
HEAD_END, LINE_END, LAST_CHUNK = b"\r\n\r\n", b"\r\n", b"0\r\n\r\n"
OF_STREAMS = (
    re.compile(rb"HTTP/1\.1 200"),
    re.compile(rb"\r\ncontent-type:[ \t]*text/event-stream", re.IGNORECASE),
    re.compile(rb"\r\ntransfer-encoding:[ \t]*chunked", re.IGNORECASE),
)
"""Patterns that are all in the head of an answer whose body is a stream."""

Take = Callable[[bytes], bool]
"""Takes a part of a stream. Returns whether the reader of the stream is too slow to take more now."""


class EngineConnection(ResponseHandler):
    """A connection to an engine. The body of a stream of events bypasses aiohttp and goes to `pass_on`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._head: bytes | None = None  # the head of an answer so far, until it is complete; None otherwise
        self._streams = False  # whether the body of a stream is arriving
        self._arrived = b""  # data that was not passed on yet: an incomplete chunk, or all data before `pass_on`
        self._take: Take | None = None
        self._woken: asyncio.Future[None] | None = None  # set when `pass_on` has something to do
        self._failure: Exception | None = None  # why the stream cannot be completed

    @property
    def streams(self) -> bool:
        """Whether the answer is a stream whose body is not complete: call `pass_on` to get it."""
        return self._streams

    def set_response_params(self, **params: Any) -> None:
        """Prepare for the next answer. aiohttp calls this before it sends a request."""
        self._head, self._streams, self._arrived, self._failure = b"", False, b"", None
        super().set_response_params(**params)

    def data_received(self, data: bytes) -> None:
        if self._streams:
            self._arrive(data)
        elif self._head is None:
            super().data_received(data)
        else:
            self._begin(self._head + data)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._fail(aiohttp.ClientPayloadError(f"the connection was lost in the middle of a stream: {exc}"))

    def close(self) -> None:
        super().close()
        self._fail(aiohttp.ClientConnectionError("the connection was closed in the middle of a stream"))

    async def pass_on(self, take: Take, caught_up: Callable[[], Awaitable[None]]) -> None:
        """Call `take` with the parts of a stream as they arrive, until the stream ends.

        Raises aiohttp.ClientError if the engine fails, and whatever `take` raises.

        caught_up: waits until the reader can take more. Nothing is read from the engine while it waits.
        """
        self._take = take
        lost, self._failure = self._failure, None  # what arrived before the connection was lost is passed on first
        try:
            while self._streams:
                self._woken = self._loop.create_future()
                if self.transport is not None:
                    self.transport.resume_reading()
                self._arrive(b"")
                if self._streams:
                    self._failure = self._failure or lost
                    if self._failure is None:
                        await self._woken
                if self._failure is not None:
                    raise self._failure
                await caught_up()
        finally:
            self._take = self._woken = None

    def _begin(self, data: bytes) -> None:
        """Handle the first bytes of an answer. If it is a stream, aiohttp gets only the head."""
        head, found, body = data.partition(HEAD_END)
        if not found and len(data) <= LONGEST_HEAD:
            self._head = data
            return
        self._head, is_stream = None, all(each.search(head) for each in OF_STREAMS)
        if not found or not is_stream:
            super().data_received(data)
            return
        self._streams, self._arrived = True, body
        super().data_received(head + found)

    def _arrive(self, data: bytes) -> None:
        """Handle data of a stream's body: pass complete chunks on."""
        if self._arrived:
            data = self._arrived + data
        if self._take is None or self._failure is not None:
            self._arrived = data
            if len(data) > MOST_UNREAD and self.transport is not None:
                self.transport.pause_reading()
            return
        at, slow = 0, False
        try:
            while (end := data.find(LINE_END, at)) >= 0:
                stop = end + 2 + size_of(data[at:end])
                if len(data) < stop + 2:
                    break
                if stop == end + 2:
                    self._end()
                    return
                at, part = stop + 2, data[end + 2 : stop]
                slow = self._take(part)
        except Exception as error:
            self._fail(error)
        self._arrived = data[at:]
        if slow and self.transport is not None:
            self.transport.pause_reading()
            self._wake()

    def _end(self) -> None:
        """End a stream. aiohttp gets the last chunk, so that it keeps the connection for further requests."""
        self._streams, self._arrived = False, b""
        super().data_received(LAST_CHUNK)
        self._wake()

    def _fail(self, error: Exception) -> None:
        if self._streams and self._failure is None:
            self._failure = error
            self._wake()

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)


def size_of(line: bytes) -> int:
    """Return the size in the first line of a chunk. Raises aiohttp.ClientPayloadError."""
    try:
        size = int(line, 16)
    except ValueError:
        size = -1
    if size < 0:
        raise aiohttp.ClientPayloadError(f"{line[:32]!r} is no size of a chunk")
    return size


class EngineConnector(aiohttp.TCPConnector):
    """The router's pool of connections to engines, without a limit of their number."""

    def __init__(self) -> None:
        super().__init__(limit=0, keepalive_timeout=KEPT_S)
        self._factory: partial[EngineConnection] = partial(EngineConnection, loop=self._loop)  # type: ignore[assignment]  # aiohttp names the base class


class ClientStream:
    """The body of a stream to a client, written without awaiting. aiohttp writes the head and the end."""

    def __init__(self, transport: asyncio.Transport, caught_up: Callable[[], Awaitable[None]], chunked: bool) -> None:
        """caught_up: waits until the client has read enough for more to be written."""
        self._transport, self.caught_up, self._chunked = transport, caught_up, chunked
        self._most = transport.get_write_buffer_limits()[1]

    def write(self, data: bytes) -> bool:
        """Write a part of the body. Return whether the client is too slow to take more now.

        Raises ConnectionResetError if the client has left, rather than aiohttp's error, which would blame the engine.
        """
        transport = self._transport
        if transport.is_closing():
            raise left()
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        return transport.get_write_buffer_size() > self._most


async def begin(response: web.StreamResponse, request: web.Request) -> ClientStream:
    """Send the headers of a stream. Raises ConnectionResetError if the client has left."""
    writer, transport = await response.prepare(request), request.transport
    if writer is None or transport is None:
        raise left()
    await response.write(b"")
    return ClientStream(transport, writer.drain, "Transfer-Encoding" in response.headers)


def left() -> ConnectionResetError:
    return ConnectionResetError("the client has left")
