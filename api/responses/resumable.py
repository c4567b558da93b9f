"""Streams of responses that another engine can continue (`api/resuming.py`)."""

import re
import time
import uuid

from aiohttp import web

from baton.api import errors
from baton.api.errors import DRAINING
from baton.api.exchange import STREAM_ERROR
from baton.api.parsing import RESUME
from baton.api.responses.events import EventCursor
from baton.api.responses.items import frames
from baton.api.responses.run import ResponseRun
from baton.api.resuming import RESUMABLE, ROUTED, Resumption, SentPart, TokensSent, begun, comment
from baton.api.server import SERVER
from baton.api.sse import HEADERS, PING, leave_to_router

ID = re.compile(r"resp_[0-9a-f]{32}")


def begin_response(resumption: Resumption | None) -> tuple[str, int]:
    """Return the id of a response and when it was created: those that its client knows. Raises ApiError 400."""
    if resumption is None:
        return f"resp_{uuid.uuid4().hex}", int(time.time())
    ids = resumption.begun.ids
    if len(ids) != 1 or not ID.fullmatch(ids[0]):
        raise errors.bad_request(f"{RESUME}: expected the id of one response", RESUME, "invalid_value")
    return ids[0], resumption.begun.created


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
    told = 0
    if transcript.taken_over:
        opening, told = opening + comment(TokensSent(parts=[])), run.taken_over
    await response.write(opening)
    reader = EventCursor(transcript, max(transcript.opening, transcript.taken_over) - 1)
    while not reader.over:
        events = await reader.next(ping)
        if run.error is not None and run.error.code == DRAINING:
            leave_to_router(request)
        note = b""
        if events and reader.caught_up:
            part = SentPart(0, bytes(run.tokens[told:]), run.shown, transcript.over)
            note, told = comment(TokensSent(parts=[part], events=reader.position)), len(run.tokens)
        await response.write(frames(events) + note or PING)
    if run.error is not None:
        request[STREAM_ERROR] = run.error.code or run.error.type
    return response
