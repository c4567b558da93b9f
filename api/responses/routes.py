"""/v1/responses over HTTP. The server stores responses, so that a later response can continue an earlier one."""

from aiohttp import web

from baton.api import errors
from baton.api.errors import DRAINING
from baton.api.exchange import GENERATION, STREAM_ERROR, answer_json, answer_with_error, read_body
from baton.api.parsing import read_number
from baton.api.responses.events import EventCursor
from baton.api.responses.input_items import list_items
from baton.api.responses.items import frames
from baton.api.responses.request import read_request
from baton.api.responses.run import ResponseRun
from baton.api.responses.start import start_response
from baton.api.responses.store import RESPONSES, StoredResponse
from baton.api.resuming import RESUMABLE, ROUTED, SentPart, TokensSent, begun, comment
from baton.api.security import owner_of
from baton.api.server import SERVER
from baton.api.sse import HEADERS, PING, leave_to_router

routes = web.RouteTableDef()


@routes.post("/v1/responses")
async def create_response(request: web.Request) -> web.StreamResponse:
    """Create a response. Answer when it has ended, or with a stream, or at once if it runs in the background."""
    server = request.app[SERVER]
    body = read_request(await read_body(request))
    with await start_response(request, body, caller_records=not body.background) as run:
        if not body.background:
            request[GENERATION] = run.generation
        if body.stream:
            if not body.background:
                await run.wait_begun(server.config.ping_interval)
            if is_resumable(request, run):
                return await resumable_stream(request, run)
            return await stream(request, run.response)
        if body.background:
            return answer_json(run.response.body)
        response = await run.read()
        if run.error is not None:
            return answer_with_error(request, response, run.error)
        return answer_json(response)


async def stream(request: web.Request, stored: StoredResponse, after: int = -1) -> web.StreamResponse:
    """Answer with a stream of the events of `stored` whose numbers are above `after`. Raises ApiError 400."""
    reader = EventCursor(stored.transcript, after)
    response = web.StreamResponse(headers=HEADERS)
    await response.prepare(request)
    while not reader.over:
        await response.write(frames(await reader.next(request.app[SERVER].config.ping_interval)) or PING)
    if stored.body["error"] is not None:
        request[STREAM_ERROR] = stored.body["error"]["code"]
    return response


def is_resumable(request: web.Request, run: ResponseRun) -> bool:
    """Return whether another engine knows all that this response depends on, and its client is a router."""
    body = run.response.body
    alone = not body["background"] and not run.is_turn and run.response.previous is None
    return ROUTED in request.headers and alone and not run.has_logprobs


async def resumable_stream(request: web.Request, run: ResponseRun) -> web.StreamResponse:
    """Answer with a stream of a response's events, and comments for the router.

    A comment follows when all text so far is part of an event. The output that the client has from another engine is
    left out: an empty comment stands for it.
    """
    transcript, ping = run.transcript, request.app[SERVER].config.ping_interval
    response = web.StreamResponse(headers=HEADERS | {RESUMABLE: "1"})
    await response.prepare(request)
    opening = frames(transcript.events(0, transcript.opening))
    opening += begun(request.app[SERVER].loaded(), run.generation, run.response.body["created_at"])
    noted = 0
    if transcript.taken_over:
        opening, noted = opening + comment(TokensSent(parts=[])), run.taken_over
    await response.write(opening)
    reader = EventCursor(transcript, max(transcript.opening, transcript.taken_over) - 1)
    while not reader.over:
        events = await reader.next(ping)
        if run.error is not None and run.error.code == DRAINING:
            leave_to_router(request)
        note = b""
        if events and reader.caught_up:
            part = SentPart(0, bytes(run.tokens[noted:]), run.shown, transcript.over)
            note, noted = comment(TokensSent(parts=[part], events=reader.position)), len(run.tokens)
        await response.write(frames(events) + note or PING)
    if run.error is not None:
        request[STREAM_ERROR] = run.error.code or run.error.type
    return response


@routes.get("/v1/responses/{response}")
async def get_response(request: web.Request) -> web.StreamResponse:
    """Return the response. With ?stream=true return its events, from the one after number `starting_after` on."""
    response = find(request)
    if request.query.get("stream") != "true":
        if "starting_after" in request.query:
            raise errors.bad_request("starting_after needs stream=true", "starting_after", "invalid_value")
        return answer_json(response.body)
    after = read_number(request.query, "starting_after", "the number of an event")
    return await stream(request, response, after if after is not None else -1)


@routes.get("/v1/responses/{response}/input_items")
async def get_input_items(request: web.Request) -> web.Response:
    response = find(request)
    return answer_json(list_items(response, request.query))


@routes.delete("/v1/responses/{response}")
async def delete_response(request: web.Request) -> web.Response:
    """Delete a response; abort it if it is running. Responses that continue it keep its messages."""
    response = find(request)
    request.app[RESPONSES].delete(owner_of(request), response.id)
    request.app[SERVER].gateway.abort(response.id)
    return answer_json({"id": response.id, "object": "response", "deleted": True})


@routes.post("/v1/responses/{response}/cancel")
async def cancel_response(request: web.Request) -> web.Response:
    """Abort a response, wait for its end, and return it. A response that has ended already stays unchanged."""
    response = find(request)
    request.app[SERVER].gateway.abort(response.id)
    await response.finished.wait()
    return answer_json(response.body)


def find(request: web.Request) -> StoredResponse:
    """Return the stored response that the path names. Raises ApiError 404."""
    return request.app[RESPONSES].get(owner_of(request), request.match_info["response"])
