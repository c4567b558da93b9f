"""From what a client asks for to a response that runs."""

import time
import uuid
from contextlib import ExitStack
from functools import partial
from typing import Any

import msgspec
import structlog
from aiohttp import web

from baton.actors.requests import Output, Request
from baton.api import errors
from baton.api.exchange import REQUEST_ID, request_context, salt_of
from baton.api.generation.chat_prompt import Render, effort_variables, render
from baton.api.generation.outputs import Generation
from baton.api.generation.parsed_answer import ParsedAnswer
from baton.api.generation.request_builder import build_request
from baton.api.generation.served_model import ServedModel, Text
from baton.api.generation.tool_choice import grammar_of, read_tool_use
from baton.api.openai.chat_answers import choice_logprobs
from baton.api.responses.context import chain_messages, find_previous, open_turn
from baton.api.responses.events import Transcript
from baton.api.responses.input import read_input
from baton.api.responses.offered import read_response_tool
from baton.api.responses.request import ResponseRequest, params_of, wanted_in
from baton.api.responses.run import ResponseRun
from baton.api.responses.store import RESPONSES, StoredResponse
from baton.api.responses.truncation import render_what_fits
from baton.api.security import owner_of
from baton.api.server import SERVER
from baton.api.sessions.log import Turn, is_fed
from baton.api.sessions.session import OpenTurn
from baton.api.sessions.store import SESSIONS
from baton.api.sessions.turns import extend_chat

Messages = list[dict[str, Any]]


async def start_response(
    request: web.Request, asked: ResponseRequest, latest: StoredResponse | None = None, caller_records: bool = False
) -> ResponseRun:
    """Render, submit and store a response, and start the task that reads it. Raises 400, 404, 409, 503.

    latest: a response that may be gone on from although it is not stored. caller_records: the caller logs its end.
    """
    server, responses = request.app[SERVER], request.app[RESPONSES]
    owner, id = owner_of(request), f"resp_{uuid.uuid4().hex}"
    model = server.ready(asked.model)
    if asked.background and not responses.enabled:
        raise errors.unsupported("background", "needs stored responses: --response-retention is 0")
    previous = find_previous(responses, owner, asked.previous_response_id, latest)
    messages = await read_input(model, asked.input, partial(responses.item, owner))
    use = await read_tool_use(model, asked.tools, asked.tool_choice, asked.parallel_tool_calls, read_response_tool)
    variables = effort_variables(model, asked.effort, "reasoning.effort") | asked.chat_template_kwargs
    make, salt = render_of(asked), salt_of(request, asked.cache_salt)
    with ExitStack() as unless_begun:
        turn = open_turn(request.app[SESSIONS], owner, asked, id)
        if turn is not None:
            unless_begun.enter_context(turn)
            salt = turn.session.salt
            prompt = await extend_chat(model, turn, opening(asked, turn.base) + messages, variables, use, make)
        else:
            whole = instructions(asked) + chain_messages(previous) + messages
            prompt = await make(model, whole, "answer" if asked.generate else "closed", variables, use.tools, salt=salt)
        grammar = await grammar_of(model, prompt, use, wanted_in(asked))
        built = build_request(model, id, prompt, params_of(asked, salt, grammar))
        generation = submit(request, model, built, turn)
        unless_begun.pop_all()
    logprobs = partial(encoded_logprobs, model.text) if asked.logprobs else None
    body = new_body(server.name, asked, built, turn, store=asked.store and responses.enabled)
    parsed = ParsedAnswer(model, prompt, use, id)
    transcript = Transcript(body, parsed, logprobs, prefill_only=not asked.generate)
    response = StoredResponse(id=id, transcript=transcript, previous=previous, messages=messages)
    if turn is not None:
        response.base = turn.base
    if body["store"]:
        responses.put(owner, response)
    log = None if caller_records else structlog.get_logger().bind(id=request[REQUEST_ID])
    run = ResponseRun(server, responses, owner, response, generation, turn, log)
    server.spawn(run.run_to_end())
    return run


def instructions(asked: ResponseRequest) -> Messages:
    return [{"role": "system", "content": asked.instructions}] if asked.instructions else []


def opening(asked: ResponseRequest, base: Turn | None) -> Messages:
    """What comes before the input: a conversation has the instructions of its first turn."""
    return [] if is_fed(base) else instructions(asked)


def render_of(asked: ResponseRequest) -> Render:
    return render_what_fits if asked.truncation == "auto" else render


def submit(request: web.Request, model: ServedModel, built: Request, turn: OpenTurn | None) -> Generation:
    """Raises 400, 404, 503."""
    gateway = request.app[SERVER].gateway
    if turn is None:
        return gateway.submit([built], request_context(request))
    if turn.session.closed:
        raise errors.unknown_session(turn.session.id, "conversation")
    generation = gateway.submit([turn.bind(built)], request_context(request))
    turn.attach(generation, model.text.decode)
    return generation


def encoded_logprobs(text: Text, output: Output) -> list[msgspec.Raw]:
    """An output's log probabilities. As JSON they take a fraction of the memory of their objects."""
    return [msgspec.Raw(msgspec.json.encode(item)) for item in choice_logprobs(text, output.logprobs).content]


def new_body(
    model: str, asked: ResponseRequest, request: Request, turn: OpenTurn | None, store: bool
) -> dict[str, Any]:
    acted_on = asked.instructions if turn is None or not is_fed(turn.base) else None
    body = {
        "id": request.id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "queued" if asked.background else "in_progress",
        "background": asked.background,
        "conversation": {"id": turn.session.id} if turn is not None else None,
        "error": None,
        "incomplete_details": None,
        "instructions": acted_on,
        "max_output_tokens": asked.max_output_tokens,
        "metadata": asked.metadata,
        "model": model,
        "output": [],
        "parallel_tool_calls": asked.parallel_tool_calls,
        "previous_response_id": asked.previous_response_id,
        "reasoning": {"effort": asked.effort, "summary": None},
        "store": store,
        "temperature": request.sampling.temperature,
        "text": {"format": asked.text.format or {"type": "text"}},
        "tool_choice": asked.tool_choice if asked.tool_choice is not None else "auto" if asked.tools else "none",
        "tools": asked.tools,
        "top_logprobs": asked.top_logprobs,
        "top_p": request.sampling.top_p,
        "truncation": asked.truncation,
        "usage": None,
    }
    return body | ({"turn": turn.number} if turn is not None else {})
