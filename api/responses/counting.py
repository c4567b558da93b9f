"""POST /v1/responses/input_tokens: count the tokens that a response's prompt would have."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from aiohttp import web

from baton.api import errors
from baton.api.exchange import answer_json, read_body, salt_of
from baton.api.generation.chat_plan import render_input
from baton.api.parsing import convert
from baton.api.responses.context import chain_messages, find_previous
from baton.api.responses.request import IGNORED, UNSUPPORTED, ResponseRequest, check
from baton.api.responses.start import Messages, instructions, opening, read_chat, render_of
from baton.api.responses.store import RESPONSES
from baton.api.security import owner_of
from baton.api.server import SERVER
from baton.api.sessions.log import chat_messages, is_fed, with_said
from baton.api.sessions.store import SESSIONS

routes = web.RouteTableDef()


@routes.post("/v1/responses/input_tokens")
async def count_input_tokens(request: web.Request) -> web.Response:
    """Count the tokens of a response's prompt without running the response. The body may leave out the input."""
    body = read_count(await read_body(request))
    model = request.app[SERVER].ready(body.model)
    chat = await read_chat(model, body, partial(request.app[RESPONSES].item, owner_of(request)))
    whole = with_context(request, body, chat.messages)
    if not whole:
        raise errors.bad_request("input is empty: there is nothing to count", "input", "empty_input")
    salt = salt_of(request, body.cache_salt)
    prompt = await render_input(model, replace(chat, messages=whole), salt, render_of(body))
    return answer_json({"object": "response.input_tokens", "input_tokens": len(prompt.tokens)})


def read_count(fields: Mapping[str, Any]) -> ResponseRequest:
    """Read the body of a response, in which the input may be missing. Raises ApiError 400."""
    body = convert({"input": "", **fields}, ResponseRequest, IGNORED, UNSUPPORTED)
    check(body)
    return body


def with_context(request: web.Request, body: ResponseRequest, messages: Messages) -> Messages:
    """Return the messages that the response would continue, followed by `messages`. Raises ApiError: 400, 404."""
    owner = owner_of(request)
    if body.session is None:
        previous = find_previous(request.app[RESPONSES], owner, body.previous_response_id, None)
        return instructions(body) + chain_messages(previous) + messages
    session = request.app[SESSIONS].find(owner, body.session)
    if session is None:
        raise errors.unknown_session(body.session, "conversation")
    session.settle_if_over()
    head = session.head
    return with_said(chat_messages(head), opening(body, head) + messages, is_first=not is_fed(head))
