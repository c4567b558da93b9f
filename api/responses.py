"""/v1/responses: the conversation is kept here, and a next response names the last."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta, Struct, field

from actors.messages import Request
from api import errors
from api.chat_prompt import read_message, render
from api.drafting import (
    Bias,
    Count,
    MinP,
    Penalty,
    Priority,
    RepetitionPenalty,
    Salt,
    Seed,
    Temperature,
    TopK,
    TopLogprobs,
    TopP,
    Wishes,
    draft,
)
from api.engine import SERVER, Engine, Server
from api.generation import Generation
from api.handling import STREAM_ERROR, answer_json, new_id, submit
from api.openai_fields import IGNORED as IGNORED_EVERYWHERE
from api.parsing import convert, read_object
from api.response_events import Event, ResponseEvents
from api.response_store import StoredResponse, conversation, no_previous
from api.security import owner_of
from api.sse import HEADERS, PING, Writer

LOGPROBS = "message.output_text.logprobs"
IGNORED = (IGNORED_EVERYWHERE - {"metadata"}) | {"max_tool_calls", "stream_options", "prompt_cache_options"}
TEXT: tuple[Any, ...] = ({}, {"format": {"type": "text"}})
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "text": (*TEXT, *({**value, "verbosity": level} for value in TEXT for level in ("low", "medium", "high", None))),
    "truncation": ("disabled",),
    "reasoning": ({}, {"effort": "none"}, {"effort": None}, {"effort": None, "summary": None}),
    "background": (False,),
    "generate": (True,),
    "conversation": (),
    "context_management": ([],),
    "prompt": (),
    "moderation": (),
    "image": (),
    "access_programs": (),
}


class ResponseRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """As OpenAI has it, and with the sampling fields that the other endpoints know."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    stream: bool = False
    max_output_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    min_tokens: Count = 0
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: dict[str, Bias] = field(default_factory=dict)
    seed: Seed | None = None
    stop: str | list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    include: list[str] = field(default_factory=list)
    top_logprobs: TopLogprobs = 0
    metadata: dict[str, str] = field(default_factory=dict)
    priority: Priority = 0
    cache_salt: Salt = ""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Draft:
    """A response that is ready to run."""

    response: StoredResponse
    request: Request
    engine: Engine
    logprobs: bool
    stored: bool

    def start(self, server: Server, owner: bytes, generation: Generation) -> ResponseEvents:
        if self.stored:
            server.responses.put(owner, self.response)
        forget = partial(server.responses.delete, owner, self.response.id)
        return ResponseEvents(self.response, generation, self.engine.text, self.logprobs, forget)


async def create_response(request: web.Request) -> web.StreamResponse:
    server = request.app[SERVER]
    body = await read_object(request)
    server.ready()
    asked = read_request(body)
    owner = owner_of(request)
    drafted = await draft_response(server, owner, asked)
    with submit(request, [drafted.request]) as generation, drafted.start(server, owner, generation) as events:
        if asked.stream:
            return await stream(request, events, server.config.ping_interval)
        return answer_json(await events.read())


async def stream(request: web.Request, events: ResponseEvents, ping_interval: float) -> web.StreamResponse:
    """Answer with `events`, the status being sent with the first of them."""
    batch = await events.next(ping_interval)
    response = web.StreamResponse(headers=HEADERS)
    await response.prepare(request)
    writer = Writer(request, response)
    await writer.write(frames(batch))
    while not events.over:
        await writer.write(frames(await events.next(ping_interval)) or PING)
    if events.body["error"] is not None:
        request[STREAM_ERROR] = events.body["error"]["code"]
    return response


async def get_response(request: web.Request) -> web.Response:
    server = request.app[SERVER]
    if request.query.get("stream") == "true":
        raise errors.unsupported("stream", "is not supported here: events are not kept")
    return answer_json(server.responses.get(owner_of(request), request.match_info["response"]).body)


async def delete_response(request: web.Request) -> web.Response:
    """Later responses keep what they went on from. One that is running is aborted."""
    server, owner = request.app[SERVER], owner_of(request)
    response = server.responses.get(owner, request.match_info["response"])
    server.responses.delete(owner, response.id)
    server.gateway.abort(response.id)
    return answer_json({"id": response.id, "object": "response", "deleted": True})


async def cancel_response(request: web.Request) -> web.Response:
    """The response as it is then; one that is over stays as it is."""
    server = request.app[SERVER]
    response = server.responses.get(owner_of(request), request.match_info["response"])
    server.gateway.abort(response.id)
    await response.finished.wait()
    return answer_json(response.body)


def read_request(body: Mapping[str, Any]) -> ResponseRequest:
    """Raises 400."""
    for name, value in body.items():
        if name in UNSUPPORTED and value not in UNSUPPORTED[name]:
            raise errors.unsupported(name)
    asked = convert(body, ResponseRequest, IGNORED | UNSUPPORTED.keys())
    if not asked.input:
        raise errors.bad_request("input: there is nothing to answer", "input", "empty_input")
    return asked


def read_input(asked: ResponseRequest) -> list[dict[str, Any]]:
    if isinstance(asked.input, str):
        return [{"role": "user", "content": asked.input}]
    return [read_item(item, f"input[{index}]") for index, item in enumerate(asked.input)]


def read_item(item: Mapping[str, Any], at: str) -> dict[str, Any]:
    """A message, or an earlier response's output sent back."""
    if item.get("type", "message") != "message":
        raise errors.unsupported(f"{at}.type", f"is {item['type']!r}: only messages are supported")
    return read_message({name: value for name, value in item.items() if name not in ("type", "phase")}, at)


async def draft_response(
    server: Server, owner: bytes, asked: ResponseRequest, latest: StoredResponse | None = None
) -> Draft:
    """latest: one that may be gone on from although it is not stored. Raises 400, 404, 503."""
    engine = server.ready(asked.model)
    previous = find_previous(server, owner, asked.previous_response_id, latest)
    messages = read_input(asked)
    instructions = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
    prompt = await render(engine, instructions + conversation(previous) + messages, True, asked.chat_template_kwargs)
    id = new_id("resp")
    logprobs = bool(asked.top_logprobs) or LOGPROBS in asked.include
    request = draft(engine, id, prompt, wishes_of(asked, logprobs))
    stored = asked.store and server.responses.enabled
    response = StoredResponse(id, previous, messages, new_body(server, asked, request, stored))
    return Draft(response, request, engine, logprobs, stored)


def find_previous(server: Server, owner: bytes, id: str | None, latest: StoredResponse | None) -> StoredResponse | None:
    if id is None:
        return None
    previous = latest if latest is not None and latest.id == id else server.responses.find(owner, id)
    if previous is None:
        raise no_previous(id)
    if previous.running:
        message = f"response {id!r} is not finished"
        raise errors.bad_request(message, "previous_response_id", "previous_response_in_progress")
    return previous


def wishes_of(asked: ResponseRequest, logprobs: bool) -> Wishes:
    return Wishes(
        max_tokens=asked.max_output_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        min_p=asked.min_p,
        repetition_penalty=asked.repetition_penalty,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        logit_bias=asked.logit_bias,
        seed=asked.seed,
        min_tokens=asked.min_tokens,
        stop=asked.stop,
        stop_token_ids=asked.stop_token_ids,
        ignore_eos=asked.ignore_eos,
        priority=asked.priority,
        salt=asked.cache_salt,
        logprobs=asked.top_logprobs if logprobs else None,
        names={"prompt": "input", "max_tokens": "max_output_tokens"},
    )


def new_body(server: Server, asked: ResponseRequest, request: Request, stored: bool) -> dict[str, Any]:
    return {
        "id": request.id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "metadata": asked.metadata,
        "model": server.name,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": asked.previous_response_id,
        "reasoning": {"effort": None, "summary": None},
        "store": stored,
        "temperature": request.sampling.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": "none",
        "tools": [],
        "top_logprobs": asked.top_logprobs,
        "top_p": request.sampling.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def frames(events: list[Event]) -> bytes:
    return b"".join(
        [b"event: " + event["type"].encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n" for event in events]
    )
