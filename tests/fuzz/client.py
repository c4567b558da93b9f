"""A client that sends each request byte by byte as it was drawn, and reads the answer."""

import asyncio
import io
import json
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPResponse
from typing import Any

import aiohttp
import msgspec

from tests.fuzz.requests import FuzzRequest
from tests.fuzz.shapes import KNOWN_RESPONSE

LAST = "fuzz-last"  # A response that does not exist: the error about it marks the end of all earlier events.


@dataclass
class Answer:
    """An answer over HTTP, or the events received on a websocket."""

    status: int = 0  # 0: the connection was closed without an answer; -1: the answer is not HTTP
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    events: list[dict[str, Any]] = field(default_factory=list)  # received on a websocket


class Bytes:
    """Bytes as a socket: only the part of the interface that HTTPResponse needs."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, *_: object) -> io.BytesIO:
        return io.BytesIO(self._data)


class Client:
    """A client that sends fuzzed requests, and remembers the last response that the server stored."""

    def __init__(self, host: str, port: int, key: str = "") -> None:
        self._host, self._port = host, port
        # Sent with every request that has no Authorization header of its own.
        self._authorization = {"Authorization": f"Bearer {key}"} if key else {}
        self.known = KNOWN_RESPONSE  # the id of the last response that the server stored

    async def send(self, request: FuzzRequest) -> Answer | None:
        """Send a request and return the answer, or None if the client closed the connection before the answer."""
        try:
            answer = await (self._converse(request) if request.event else self._exchange(request))
        except aiohttp.WSServerHandshakeError as error:
            return Answer(error.status)
        except (OSError, aiohttp.ClientError):
            return Answer()
        if answer is not None and request.path == "/v1/responses" and answer.status == 200:
            self._remember(answer)
        return answer

    def _remember(self, answer: Answer) -> None:
        with suppress(ValueError, KeyError):  # A streamed answer is not one JSON object.
            self.known = json.loads(answer.body)["id"]

    async def _exchange(self, request: FuzzRequest) -> Answer | None:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(self.message(request))
            if request.leaves is not None:
                await reader.read(request.leaves)
                return None
            return parse(await reader.read(), request.method)
        finally:
            writer.close()

    def message(self, request: FuzzRequest) -> bytes:
        """Return the bytes of an HTTP request, with the required headers that the request lacks."""
        body = self._filled(request.body)
        own = {name.lower() for name, _ in request.headers}
        headers = [*request.headers, (b"Connection", b"close"), (b"Content-Length", str(len(body)).encode())]
        if b"host" not in own:
            headers.insert(0, (b"Host", b"127.0.0.1"))
        if b"authorization" not in own:
            headers += [(name.encode(), value.encode()) for name, value in self._authorization.items()]
        target = self._filled(request.target.encode())
        head = b"%s %s HTTP/1.1\r\n" % (request.method.encode(), target)
        return head + b"".join(b"%s: %s\r\n" % header for header in headers) + b"\r\n" + body

    def _filled(self, text: bytes) -> bytes:
        return text.replace(KNOWN_RESPONSE.encode(), self.known.encode())

    async def _converse(self, request: FuzzRequest) -> Answer:
        """Send one event on a websocket; return the events before the error that LAST causes in its lane."""
        answer = Answer(101)
        last = {"type": "response.resume", "response_id": LAST} | lane_of(request.body)
        async with (
            aiohttp.ClientSession(f"http://{self._host}:{self._port}", headers=self._authorization) as session,
            session.ws_connect("/v1/responses", max_msg_size=0) as socket,
        ):
            await socket.send_bytes(self._filled(request.body))
            await socket.send_str(json.dumps(last))
            async for message in socket:
                if message.type is aiohttp.WSMsgType.ERROR:
                    break
                event = json.loads(message.data)
                if event["type"] == "error" and LAST in event["error"]["message"]:
                    return answer
                answer.events.append(event)
        answer.status = 0
        return answer


def lane_of(body: bytes) -> dict[str, str]:
    """Return the event's `stream_id` field, which selects a lane of the websocket, if it is valid."""
    try:
        lane = msgspec.json.decode(body)["stream_id"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return {"stream_id": lane} if isinstance(lane, str) and 0 < len(lane) <= 256 else {}


def parse(data: bytes, method: str) -> Answer:
    if not data:
        return Answer()
    response = HTTPResponse(Bytes(data), method=method)  # type: ignore[arg-type]
    try:
        response.begin()
        body = response.read()
    except (HTTPException, ValueError) as error:
        return Answer(-1, {}, f"{type(error).__name__}: {data[:200]!r}".encode())
    return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, body)
