"""Chat completions that a client wants to see again: they are not stored."""

from aiohttp import web

from baton.api.errors import ApiError

routes = web.RouteTableDef()


@routes.get("/v1/chat/completions")
@routes.get("/v1/chat/completions/{completion}")
@routes.get("/v1/chat/completions/{completion}/messages")
@routes.post("/v1/chat/completions/{completion}")
@routes.delete("/v1/chat/completions/{completion}")
async def not_stored(_: web.Request) -> web.Response:
    """404 for all of them, also those that were asked for with `store`."""
    message = "chat completions are not stored here, whatever store says: use /v1/responses or /v1/conversations"
    raise ApiError(404, message, "not_found_error", code="chat_completions_not_stored")
