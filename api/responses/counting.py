"""POST /v1/responses/input_tokens: how long a response's prompt would be."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from aiohttp import web

from baton.api import errors
from baton.api.exchange import answer_json, read_asked, salt_of
from baton.api.generation.chat_prompt import effort_variables
from baton.api.generation.tool_choice import read_tool_use
from baton.api.parsing import convert
from baton.api.responses.context import chain_messages, find_previous
from baton.api.responses.input import read_input
from baton.api.responses.offered import read_response_tool
from baton.api.responses.request import IGNORED, UNSUPPORTED, ResponseRequest, check
from baton.api.responses.start import Messages, instructions, opening, render_of
from baton.api.responses.store import RESPONSES
from baton.api.security import owner_of
from baton.api.server import SERVER
from baton.api.sessions.log import chat_messages, is_fed, with_said
from baton.api.sessions.store import SESSIONS

routes = web.RouteTableDef()


@routes.post("/v1/responses/input_tokens")
async def count_input_tokens(request: web.Request) -> web.Response:
    """A body as for /v1/responses, of which nothing is run; the input may be left out."""
    asked = read_count(await read_asked(request))
    model = request.app[SERVER].ready(asked.model)
    use = await read_tool_use(model, asked.tools, asked.tool_choice, asked.parallel_tool_calls, read_response_tool)
    variables = effort_variables(model, asked.effort, "reasoning.effort") | asked.chat_template_kwargs
    find = partial(request.app[RESPONSES].item, owner_of(request))
    messages = await read_input(model, asked.input, find) if asked.input else []
    whole = gone_on_from(request, asked, messages)
    if not whole:
        raise errors.bad_request("input: there is nothing to count", "input", "empty_input")
    make, salt = render_of(asked), salt_of(request, asked.cache_salt)
    prompt = await make(model, whole, "answer" if asked.generate else "closed", variables, use.tools, salt=salt)
    return answer_json({"object": "response.input_tokens", "input_tokens": len(prompt.tokens)})


def read_count(body: Mapping[str, Any]) -> ResponseRequest:
    """Raises 400."""
    asked = convert({"input": "", **body}, ResponseRequest, IGNORED, UNSUPPORTED)
    check(asked)
    return asked


def gone_on_from(request: web.Request, asked: ResponseRequest, messages: Messages) -> Messages:
    """The messages behind what the response would go on from. Raises 400, 404."""
    owner = owner_of(request)
    if asked.session is None:
        previous = find_previous(request.app[RESPONSES], owner, asked.previous_response_id, None)
        return instructions(asked) + chain_messages(previous) + messages
    session = request.app[SESSIONS].find(owner, asked.session)
    if session is None:
        raise errors.unknown_session(asked.session, "conversation")
    session.settle_if_over()
    head = session.head
    return with_said(chat_messages(head), opening(asked, head) + messages, is_first=not is_fed(head))
