"""The body of a request, read within its limits."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from baton.api.connections.connection import ClientConnection
from baton.api.connections.registry import CONNECTIONS


@asynccontextmanager
async def whole_body(request: web.Request) -> AsyncIterator[bytes]:
    """The body, decompressed. It counts as being on its way for as long as the block lasts.

    Raises ApiError 408 if it does not come in time, 503 if too much is on its way and most of it here;
    HTTPRequestEntityTooLarge for more than the application takes.
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
