"""POST /v1/chat/completions."""

import time
from typing import Annotated, Any

from aiohttp import web
from msgspec import Meta, field

from baton.actors.requests import Request
from baton.api import errors
from baton.api.exchange import answer_json, new_id, read_asked, salt_of, submit
from baton.api.generation.answers import collect, logprobs_size, usage
from baton.api.generation.chat_prompt import effort_variables, read_ending, render
from baton.api.generation.fields import Choices, Salt, TopLogprobs, request_params, seed_of
from baton.api.generation.messages import read_messages
from baton.api.generation.offload import off_loop
from baton.api.generation.parsed_answer import ParsedAnswer
from baton.api.generation.request_builder import Prompt, build_request
from baton.api.generation.served_model import ServedModel
from baton.api.generation.structured import StructuredFields, wanted_in
from baton.api.generation.tool_choice import grammar_of, read_tool_use
from baton.api.generation.tools import ToolUse, read_tool
from baton.api.openai.chat_answers import ChatChoice, ChatCompletion, ChatEncoder, choice_logprobs, choice_of
from baton.api.openai.fields import IGNORED, UNSUPPORTED, StreamOptions
from baton.api.parsing import Unsupported, convert
from baton.api.server import SERVER
from baton.api.sse import stream

routes = web.RouteTableDef()

OWN = ("tools", "tool_choice", "parallel_tool_calls", "reasoning_effort", "store")
IGNORED_IN_CHAT = IGNORED - set(OWN)
UNSUPPORTED_IN_CHAT: Unsupported = {name: same for name, same in UNSUPPORTED.items() if name not in OWN}


class ChatRequest(StructuredFields, forbid_unknown_fields=True, kw_only=True):
    """store: taken from clients that always give it; nothing is stored, and `api/openai/stored.py` says so."""

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
    tools: list[Any] = field(default_factory=list)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    store: bool = False


@routes.post("/v1/chat/completions")
async def chat_completions(request: web.Request) -> web.StreamResponse:
    server = request.app[SERVER]
    asked = convert(await read_asked(request), ChatRequest, IGNORED_IN_CHAT, UNSUPPORTED_IN_CHAT)
    model = server.ready(asked.model)
    id = new_id("chatcmpl")
    use = await read_tool_use(model, asked.tools, asked.tool_choice, asked.parallel_tool_calls, read_tool)
    salt = salt_of(request, asked.cache_salt)
    prompt = await chat_prompt(model, asked, use, salt)
    requests = await chat_requests(model, asked, prompt, use, id, salt)
    with submit(request, requests) as generation:
        if asked.stream:
            parsed = [ParsedAnswer(model, prompt, use, each.id) for each in requests]
            options = asked.stream_options or StreamOptions()
            encoder = ChatEncoder(id, server.name, model.text, parsed, generation, asked.logprobs, options)
            return await stream(request, generation, encoder, server.config.ping_interval)
        answers = await collect(generation)
        parsed = [
            ParsedAnswer.of(answer, model, prompt, use, each.id) for answer, each in zip(answers, requests, strict=True)
        ]

        def choices_of() -> list[ChatChoice]:
            told = [choice_logprobs(model.text, each.logprobs) if asked.logprobs else None for each in answers]
            return [choice_of(index, *each) for index, each in enumerate(zip(answers, parsed, told, strict=True))]

        choices = await off_loop(logprobs_size(answers), choices_of)
        total = usage(generation, asked.n, reasoning_tokens=sum(each.reasoning_tokens for each in parsed))
        return answer_json(
            ChatCompletion(id=id, created=int(time.time()), model=server.name, choices=choices, usage=total)
        )


async def chat_prompt(model: ServedModel, asked: ChatRequest, use: ToolUse, salt: str) -> Prompt:
    messages = await read_messages(model, asked.messages)
    ending = read_ending(asked.add_generation_prompt, asked.continue_final_message)
    variables = effort_variables(model, asked.reasoning_effort, "reasoning_effort") | asked.chat_template_kwargs
    return await render(model, messages, ending, variables, use.tools, salt=salt)


async def chat_requests(
    model: ServedModel, asked: ChatRequest, prompt: Prompt, use: ToolUse, id: str, salt: str
) -> list[Request]:
    """The ring's requests, one a choice."""
    if asked.top_logprobs and not asked.logprobs:
        raise errors.bad_request("top_logprobs needs logprobs: true", "top_logprobs", "invalid_value")
    limit = asked.max_completion_tokens if asked.max_completion_tokens is not None else asked.max_tokens
    grammar = await grammar_of(model, prompt, use, wanted_in(asked))
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
                grammar=grammar,
                names={"prompt": "messages"},
            ),
        )
        for index in range(asked.n)
    ]
