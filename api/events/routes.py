"""GET /v1/events: the events of this engine, for routers."""

from aiohttp import web

from baton.api.events.feed import Feed
from baton.api.sse import HEADERS

routes = web.RouteTableDef()
FEED = web.AppKey("feed", Feed)


@routes.get("/v1/events")
async def events(request: web.Request) -> web.StreamResponse:
    """Send a snapshot, then changes, as server-sent events until the client disconnects. Works in every phase."""
    response = web.StreamResponse(headers=HEADERS)

    def cut_off() -> None:
        if request.transport is not None:
            request.transport.abort()

    with request.app[FEED].connected(cut_off) as frames:
        await response.prepare(request)
        async for frame in frames:
            await response.write(frame)
    return response
