"""OpenAI's endpoints for stored chat completions. All answer 404, because this server stores none."""

from aiohttp import web

from baton.api.errors import ApiError

routes = web.RouteTableDef()


@routes.get("/v1/chat/completions")
@routes.get("/v1/chat/completions/{completion}")
@routes.get("/v1/chat/completions/{completion}/messages")
@routes.post("/v1/chat/completions/{completion}")
@routes.delete("/v1/chat/completions/{completion}")
async def not_stored(_: web.Request) -> web.Response:
    """Answer 404, even for chat completions that were requested with `store`."""
    message = "this server stores no chat completions, even with store: use /v1/responses or /v1/conversations"
    raise ApiError(404, message, "not_found_error", code="chat_completions_not_stored")
