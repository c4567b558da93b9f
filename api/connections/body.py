"""Reading of a request's body, within limits of time and size."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from baton.api.connections.connection import ClientConnection
from baton.api.connections.registry import CONNECTIONS


@asynccontextmanager
async def whole_body(request: web.Request) -> AsyncIterator[bytes]:
    """Read and yield the decompressed body. Its bytes count as in flight until the context ends.

    Raises ApiError 408 if the body is late, and 503 if too many bytes are in flight and this connection holds most.
    Raises HTTPRequestEntityTooLarge if the body is larger than the application's limit.
    """
    connections = request.app[CONNECTIONS]
    connection = connections.of(request)
    try:
        async with connection.reading(connections.limits.body):
            body = await read_body(request, connection)
        yield body
    finally:
        connection.hold(body=0)


async def read_body(request: web.Request, connection: ClientConnection) -> bytes:
    """Read the decompressed body, and count its bytes as in flight on the connection."""
    limit = request.client_max_size
    if (request.content_length or 0) > limit:
        raise web.HTTPRequestEntityTooLarge(limit)
    body = bytearray()
    while chunk := await request.content.readany():
        body += chunk
        if len(body) > limit:
            raise web.HTTPRequestEntityTooLarge(limit)
        connection.take(len(chunk))
    return bytes(body)
