"""Reading of a request's body, within limits of time and size."""

import mmap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.web_protocol import RequestPayloadError

from baton.api import errors
from baton.api.connections.connection import ClientConnection
from baton.api.connections.registry import CONNECTIONS
from baton.api.errors import ApiError

# Values of Content-Encoding that aiohttp accepts and decompresses.
ENCODINGS = frozenset({"identity", "gzip", "deflate", "br", "zstd"})


@asynccontextmanager
async def whole_body(request: web.Request) -> AsyncIterator[memoryview]:
    """Read and yield the decompressed body, which is valid in this context only.

    Its bytes count as in flight until the request is answered, because handlers keep what they have decoded from it.

    Raises ApiError 408 if the body is late, and 503 if too many bytes are in flight and this connection holds most.
    Raises HTTPRequestEntityTooLarge if the body is larger than the application's limit.
    """
    connections = request.app[CONNECTIONS]
    connection = connections.of(request)
    # The body is outside the heap. A growing buffer in the heap leaves holes that only small objects fit into, and a
    # cancelled reader may stay in a reference cycle, with its buffer, until the next full garbage collection.
    with map_memory(space_for(request)) as space:
        async with connection.reading(connections.limits.body, space):
            await read_body(request, connection)
        with memoryview(space) as whole, whole[: space.tell()] as body:
            yield body


def check_encoding(request: web.Request) -> None:
    """Raise ApiError 415 if the body is compressed in an unsupported way."""
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    if encoding and encoding not in ENCODINGS:
        message = f"Content-Encoding {encoding!r} is not supported: send {', '.join(sorted(ENCODINGS))}"
        raise ApiError(415, message, "invalid_request_error", "Content-Encoding", "unsupported_media_type")


def unreadable(error: RequestPayloadError) -> ApiError:
    """Return the 400 for a body that aiohttp cannot read."""
    reason = str(error).removeprefix("400, message:").strip()
    return errors.bad_request(f"the body cannot be read: {reason}", code="invalid_body")


def space_for(request: web.Request) -> int:
    """Return the largest size that the decompressed body may have. Raises HTTPRequestEntityTooLarge."""
    limit, length = request.client_max_size, request.content_length
    if length is not None and length > limit:
        raise web.HTTPRequestEntityTooLarge(limit)
    return limit if length is None or "Content-Encoding" in request.headers else length


def map_memory(size: int) -> mmap.mmap:
    """Return zeroed memory, of which only the pages that are written to count. Raises ApiError 503."""
    try:
        return mmap.mmap(-1, max(1, size))
    except OSError:
        raise errors.unavailable("the server has no memory for the body", "out_of_memory") from None


async def read_body(request: web.Request, connection: ClientConnection) -> None:
    """Pass the decompressed body to `connection.take`."""
    limit = request.client_max_size
    while chunk := await request.content.readany():
        if connection.body + len(chunk) > limit:
            raise web.HTTPRequestEntityTooLarge(limit)
        connection.take(chunk)
