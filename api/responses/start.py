"""The start of a response: from the body of a request to the running task."""

import re
import time
import uuid
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import structlog
from aiohttp import web

from baton.actors.requests import Output, Request
from baton.api import errors
from baton.api.exchange import REQUEST_ID, request_context, salt_of
from baton.api.generation.chat_plan import ChatInput, plan_output, render_input
from baton.api.generation.chat_prompt import Render, effort_variables, preserving, render
from baton.api.generation.outputs import Generation
from baton.api.generation.request_builder import build_request
from baton.api.generation.served_model import ServedModel, Text
from baton.api.generation.tool_choice import read_budget, read_tool_use
from baton.api.openai.chat_answers import choice_logprobs
from baton.api.parsing import RESUME
from baton.api.responses.context import chain_messages, find_previous, open_turn
from baton.api.responses.events import Transcript
from baton.api.responses.input import Find, read_input
from baton.api.responses.request import ResponseRequest, params_of, wanted_in
from baton.api.responses.response_tools import read_response_tool
from baton.api.responses.run import ResponseRun
from baton.api.responses.store import RESPONSES, StoredResponse
from baton.api.responses.truncation import render_what_fits
from baton.api.resuming import Resumption, read_resumption, resumed
from baton.api.security import owner_of
from baton.api.server import SERVER
from baton.api.sessions.log import Turn, is_fed
from baton.api.sessions.session import OpenTurn
from baton.api.sessions.store import SESSIONS
from baton.api.sessions.turns import extend_chat

Messages = list[dict[str, Any]]
ID = re.compile(r"resp_[0-9a-f]{32}")


async def start_response(
    request: web.Request, body: ResponseRequest, latest: StoredResponse | None = None, caller_records: bool = False
) -> ResponseRun:
    """Render, submit and store a response, and start the task that reads its outputs. Raises ApiError: 400 to 503.

    latest: the last response of a websocket's lane, which may be continued even if it is not stored.
    caller_records: the caller logs the end of the response.
    """
    server, responses = request.app[SERVER], request.app[RESPONSES]
    owner, resumption = owner_of(request), read_resumption(request)
    id, created = begin_response(resumption)
    model = server.ready(body.model)
    if body.background and not responses.enabled:
        raise errors.unsupported("background", "needs stored responses: --response-retention is 0")
    previous = find_previous(responses, owner, body.previous_response_id, latest)
    chat = replace(await read_chat(model, body, partial(responses.item, owner)), output=wanted_in(body))
    with ExitStack() as unless_begun:
        turn = open_turn(request.app[SESSIONS], owner, body, id)
        if turn is None:
            salt = salt_of(request, body.cache_salt)
            whole = instructions(body) + chain_messages(previous) + chat.messages
            prompt = await render_input(model, replace(chat, messages=whole), salt, render_of(body))
        else:
            unless_begun.enter_context(turn)
            salt = turn.session.salt
            added = opening(body, turn.base) + chat.messages
            prompt = await extend_chat(model, turn, added, chat.variables, chat.tools, render_of(body))
        plan = await plan_output(model, prompt, chat)
        built = build_request(model, id, prompt, params_of(body, salt, plan.grammar))
        generation = submit(request, model, built, turn, resumption)
        unless_begun.pop_all()
    logprobs = partial(encoded_logprobs, model.text) if body.logprobs else None
    description = describe(server.name, body, built, turn, created, store=body.store and responses.enabled)
    transcript = Transcript(description, plan.parser(id), logprobs, prefill_only=not body.generate)
    response = StoredResponse(id=id, transcript=transcript, previous=previous, messages=chat.messages)
    if turn is not None:
        response.base = turn.base
    if description["store"]:
        if resumption is not None:
            responses.delete(owner, id)  # This engine may have begun the response before another engine continued it.
        responses.put(owner, response)
    log = None if caller_records else structlog.get_logger().bind(id=request[REQUEST_ID])
    run = ResponseRun(server, responses, owner, response, generation, turn, log)
    if resumption is not None:
        run.take_over(resumption.events)
    server.spawn(run.run_to_end())
    return run


def begin_response(resumption: Resumption | None) -> tuple[str, int]:
    """Return a response's id and creation time: new ones, or those of the resumed stream. Raises ApiError 400."""
    if resumption is None:
        return f"resp_{uuid.uuid4().hex}", int(time.time())
    ids = resumption.begun.ids
    if len(ids) != 1 or not ID.fullmatch(ids[0]):
        raise errors.bad_request(f"{RESUME}: expected the id of one response", RESUME, "invalid_value")
    return ids[0], resumption.begun.created


async def read_chat(model: ServedModel, body: ResponseRequest, find: Find) -> ChatInput:
    """Read the fields that decide the prompt. The messages do not include the context that the response continues.

    find: returns the stored item that a reference names. Raises ApiError: 400, 404.
    """
    tools = await read_tool_use(model, body.tools, body.tool_choice, body.parallel_tool_calls, read_response_tool)
    return ChatInput(
        await read_input(model, body.input, find) if body.input else [],
        "answer" if body.generate else "closed",
        effort_variables(model, body.effort, "reasoning.effort")
        | preserving(body.preserve_reasoning)
        | body.chat_template_kwargs,
        tools,
        budget=read_budget(model, *body.budget),
    )


def instructions(body: ResponseRequest) -> Messages:
    return [{"role": "system", "content": body.instructions}] if body.instructions else []


def opening(body: ResponseRequest, base: Turn | None) -> Messages:
    """Return the messages before a turn's input: the instructions, if the model has read nothing of the session yet."""
    return [] if is_fed(base) else instructions(body)


def render_of(body: ResponseRequest) -> Render:
    return render_what_fits if body.truncation == "auto" else render


def submit(
    request: web.Request, model: ServedModel, built: Request, turn: OpenTurn | None, resumption: Resumption | None
) -> Generation:
    """Submit the response's request to the ring. Raises ApiError: 400, 404, 503."""
    gateway = request.app[SERVER].gateway
    if resumption is not None:
        if turn is not None:
            raise errors.bad_request(f"{RESUME}: a turn cannot be continued", RESUME, "invalid_value")
        requests, earlier = resumed(model, [built], resumption)
        return gateway.submit(requests, request_context(request), earlier)
    if turn is None:
        return gateway.submit([built], request_context(request))
    if turn.session.closed:
        raise errors.unknown_session(turn.session.id, "conversation")
    turn.check_wanted()
    generation = gateway.submit([turn.bind(built)], request_context(request))
    turn.attach(generation, model.text.decode)
    return generation


def encoded_logprobs(text: Text, output: Output) -> list[msgspec.Raw]:
    """Return an output's log probabilities as JSON, which takes a fraction of the memory of Python objects."""
    return [msgspec.Raw(msgspec.json.encode(item)) for item in choice_logprobs(text, output.logprobs).content]


def describe(
    model: str, body: ResponseRequest, request: Request, turn: OpenTurn | None, created: int, store: bool
) -> dict[str, Any]:
    """Return the response object at the beginning of a response."""
    effective = body.instructions if turn is None or not is_fed(turn.base) else None
    description = {
        "id": request.id,
        "object": "response",
        "created_at": created,
        "completed_at": None,
        "status": "queued" if body.background else "in_progress",
        "background": body.background,
        "conversation": {"id": turn.session.id} if turn is not None else None,
        "error": None,
        "incomplete_details": None,
        "instructions": effective,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata,
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.effort, "summary": None},
        "store": store,
        "temperature": request.sampling.temperature,
        "text": {"format": body.text.format or {"type": "text"}},
        "tool_choice": body.tool_choice if body.tool_choice is not None else "auto" if body.tools else "none",
        "tools": body.tools,
        "top_logprobs": body.top_logprobs,
        "top_p": request.sampling.top_p,
        "truncation": body.truncation,
        "usage": None,
    }
    return description | ({"turn": turn.number} if turn is not None else {})
