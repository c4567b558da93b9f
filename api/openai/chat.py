"""POST /v1/chat/completions."""

import time
from collections.abc import Sequence
from typing import Annotated, Any

from aiohttp import web
from msgspec import UNSET, Meta, Struct, UnsetType, field

from actors.requests import Output, Request, TokenLogprob
from api import errors
from api.exchange import answer_json, new_id, read_asked, salt_of, submit
from api.generation.answers import Usage, collect, finite, token_text, usage
from api.generation.chat_prompt import read_ending, render
from api.generation.fields import Choices, RequestFields, Salt, TopLogprobs, request_params, seed_of
from api.generation.messages import read_messages
from api.generation.outputs import Generation
from api.generation.request_builder import build_request
from api.generation.served_model import ServedModel, Text
from api.openai.fields import IGNORED, UNSUPPORTED, StreamOptions
from api.parsing import convert
from api.server import SERVER, Server
from api.sse import stream

routes = web.RouteTableDef()


class ChatRequest(RequestFields, forbid_unknown_fields=True, kw_only=True):
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    n: Choices = 1
    logprobs: bool = False
    top_logprobs: TopLogprobs = 0
    stream_options: StreamOptions | None = None
    cache_salt: Salt = ""
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


class ChatMessage(Struct):
    role: str
    content: str
    refusal: None = None


class ChatChoice(Struct):
    index: int
    message: ChatMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None


class ChatCompletion(Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class ChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET


class ChatChunk(Struct, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET


@routes.post("/v1/chat/completions")
async def chat_completions(request: web.Request) -> web.StreamResponse:
    server = request.app[SERVER]
    asked = convert(await read_asked(request), ChatRequest, IGNORED, UNSUPPORTED)
    model = server.ready(asked.model)
    id = new_id("chatcmpl")
    requests = await chat_requests(model, asked, id, salt_of(request, asked.cache_salt))
    with submit(request, requests) as generation:
        if asked.stream:
            encoder = ChatEncoder(id, server, model.text, asked, generation)
            return await stream(request, generation, encoder, server.config.ping_interval)
        answers = await collect(generation)
        choices = [
            ChatChoice(
                index=index,
                message=ChatMessage("assistant", answer.text),
                logprobs=choice_logprobs(model.text, answer.logprobs) if asked.logprobs else None,
                finish_reason=answer.finish_reason,
                stop_reason=answer.stop_reason,
            )
            for index, answer in enumerate(answers)
        ]
        total = usage(generation, asked.n)
        return answer_json(
            ChatCompletion(id=id, created=int(time.time()), model=server.name, choices=choices, usage=total)
        )


async def chat_requests(model: ServedModel, asked: ChatRequest, id: str, salt: str) -> list[Request]:
    """The ring's requests, one a choice."""
    messages = await read_messages(model, asked.messages)
    ending = read_ending(asked.add_generation_prompt, asked.continue_final_message)
    prompt = await render(model, messages, ending, asked.chat_template_kwargs)
    if asked.top_logprobs and not asked.logprobs:
        raise errors.bad_request("top_logprobs needs logprobs: true", "top_logprobs", "invalid_value")
    limit = asked.max_completion_tokens if asked.max_completion_tokens is not None else asked.max_tokens
    return [
        build_request(
            model,
            id if asked.n == 1 else f"{id}_{index}",
            prompt,
            request_params(
                asked,
                max_tokens=limit,
                seed=seed_of(asked.seed, index),
                salt=salt,
                logprobs=asked.top_logprobs if asked.logprobs else None,
                names={"prompt": "messages"},
            ),
        )
        for index in range(asked.n)
    ]


def choice_logprobs(text: Text, items: Sequence[TokenLogprob]) -> ChoiceLogprobs:
    return ChoiceLogprobs([token_logprob(text, item) for item in items])


def token_logprob(text: Text, item: TokenLogprob) -> ChatTokenLogprob:
    shown = token_text(text, item.token)
    top = []
    for id, logprob in item.top:
        alternative = token_text(text, id)
        top.append(TopLogprob(alternative, finite(logprob), utf8(alternative)))
    logprob = finite(item.logprob) if item.logprob is not None else 0.0
    return ChatTokenLogprob(shown, logprob, utf8(shown), top)


def utf8(token: str) -> list[int] | None:
    """A token's bytes; None for a part of a character, which its text does not tell."""
    return None if "\ufffd" in token else list(token.encode())


class ChatEncoder:
    """The events of a streamed chat completion."""

    def __init__(self, id: str, server: Server, text: Text, asked: ChatRequest, generation: Generation) -> None:
        self._id = id
        self._model = server.name
        self._created = int(time.time())
        self._text = text
        self._asked = asked
        self._generation = generation
        options = asked.stream_options or StreamOptions()
        self._usage = options.include_usage or options.continuous_usage_stats
        self._continuous = options.continuous_usage_stats

    def opening(self) -> list[ChatChunk]:
        return [self._chunk(ChunkChoice(index, ChatDelta("assistant", ""))) for index in range(self._asked.n)]

    def delta(self, index: int, output: Output) -> list[ChatChunk]:
        chunks = []
        logprobs = choice_logprobs(self._text, output.logprobs) if self._asked.logprobs and output.logprobs else None
        if output.text or logprobs:
            chunks.append(self._chunk(ChunkChoice(index, ChatDelta(content=output.text), logprobs)))
        if output.finish_reason is not None:
            reason = output.stop_reason if output.finish_reason == "stop" else None
            chunks.append(self._chunk(ChunkChoice(index, ChatDelta(), None, output.finish_reason, reason)))
        return chunks

    def closing(self) -> list[ChatChunk]:
        if not self._usage:
            return []
        total = usage(self._generation, self._asked.n)
        return [ChatChunk(id=self._id, created=self._created, model=self._model, choices=[], usage=total)]

    def _chunk(self, choice: ChunkChoice) -> ChatChunk:
        so_far = usage(self._generation, self._asked.n) if self._continuous else None if self._usage else UNSET
        return ChatChunk(id=self._id, created=self._created, model=self._model, choices=[choice], usage=so_far)
