"""POST /v1/chat/completions."""

import time
from collections.abc import Sequence
from typing import Annotated, Any

from aiohttp import web
from msgspec import Meta, Struct, field

from baton.actors.requests import Request
from baton.api import errors
from baton.api.exchange import answer_json, new_id, read_body, salt_of, submit
from baton.api.generation.answers import collect, logprobs_size, usage
from baton.api.generation.chat_plan import ChatInput, ChatPlan, plan_chat
from baton.api.generation.chat_prompt import effort_variables, preserving, read_ending
from baton.api.generation.fields import Choices, Count, Salt, TopLogprobs, request_params
from baton.api.generation.messages import read_messages
from baton.api.generation.offload import off_loop
from baton.api.generation.outputs import Generation
from baton.api.generation.request_builder import build_requests, encode
from baton.api.generation.served_model import ServedModel
from baton.api.generation.structured import StructuredFields, wanted_in
from baton.api.generation.tool_choice import read_budget, read_tool_use
from baton.api.generation.tools import read_tool
from baton.api.openai.chat_answers import ChatChoice, ChatCompletion, ChatEncoder, choice_logprobs, choice_of
from baton.api.openai.fields import IGNORED, UNSUPPORTED, StreamOptions
from baton.api.parsing import Unsupported, convert
from baton.api.server import SERVER
from baton.api.sse import stream

routes = web.RouteTableDef()

# Fields that chat completions support, unlike completions.
OWN = (
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "prediction",
    "reasoning_effort",
    "thinking_token_budget",
    "store",
)
IGNORED_IN_CHAT = IGNORED - set(OWN)
UNSUPPORTED_IN_CHAT: Unsupported = {name: same for name, same in UNSUPPORTED.items() if name not in OWN}


class TextPart(Struct, tag_field="type", tag="text"):
    """One part of a text."""

    text: str


class Prediction(Struct, tag_field="type", tag="content"):
    """The text that the client expects in the answer, much of which it may repeat: drafts are taken from it."""

    content: str | list[TextPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(StructuredFields, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/chat/completions."""

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
    preserve_reasoning: bool | None = None  # show the reasoning of earlier turns; None: as --preserve-reasoning says
    tools: list[Any] = field(default_factory=list)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    thinking_token_budget: Count | None = None
    prediction: Prediction | None = None
    store: bool = False  # accepted, because some clients always send it; nothing is stored (`api/openai/stored.py`)


@routes.post("/v1/chat/completions")
async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a chat, complete or as a stream."""
    server = request.app[SERVER]
    body = convert(await read_body(request), ChatRequest, IGNORED_IN_CHAT, UNSUPPORTED_IN_CHAT)
    model = server.ready(body.model)
    salt = salt_of(request, body.cache_salt)
    plan = await plan_chat(model, await read_chat(model, body), salt)
    id = new_id("chatcmpl")
    predicted = await read_prediction(model, body.prediction)
    requests = chat_requests(body, plan, id, salt, predicted)
    with submit(request, requests) as generation:
        if body.stream:
            parsers = [plan.parser(each.id) for each in requests]
            options = body.stream_options or StreamOptions()
            encoder = ChatEncoder(id, server.name, model.text, parsers, generation, body.logprobs, options)
            return await stream(request, generation, encoder, server.config.ping_interval)
        return answer_json(await whole_completion(id, server.name, body, plan, requests, generation))


async def read_prediction(model: ServedModel, prediction: Prediction | None) -> tuple[int, ...]:
    """Return the tokens of a prediction. Raises ApiError 400 if it has more than the context."""
    if prediction is None:
        return ()
    predicted = await encode(model, prediction.text, False, "prediction")
    if len(predicted.tokens) > model.max_model_len:
        message = f"prediction: {len(predicted.tokens)} tokens are more than the context of {model.max_model_len}"
        raise errors.bad_request(message, "prediction", "invalid_value")
    return tuple(predicted.tokens)


async def read_chat(model: ServedModel, body: ChatRequest) -> ChatInput:
    """Read the fields that decide the prompt and the output. Raises ApiError 400."""
    if body.top_logprobs and not body.logprobs:
        raise errors.bad_request("top_logprobs needs logprobs: true", "top_logprobs", "invalid_value")
    tools = await read_tool_use(model, body.tools, body.tool_choice, body.parallel_tool_calls, read_tool)
    return ChatInput(
        await read_messages(model, body.messages),
        read_ending(body.add_generation_prompt, body.continue_final_message),
        effort_variables(model, body.reasoning_effort, "reasoning_effort")
        | preserving(body.preserve_reasoning)
        | body.chat_template_kwargs,
        tools,
        wanted_in(body),
        read_budget(model, body.thinking_token_budget, "thinking_token_budget"),
    )


def chat_requests(
    body: ChatRequest, plan: ChatPlan, id: str, salt: str, prediction: tuple[int, ...] = ()
) -> list[Request]:
    """Build the Requests for the ring, one for each choice. Raises ApiError 400."""
    params = request_params(
        body,
        max_tokens=body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens,
        salt=salt,
        logprobs=body.top_logprobs if body.logprobs else None,
        grammar=plan.grammar,
        prediction=prediction,
        names={"prompt": "messages"},
    )
    ids = [id] if body.n == 1 else [f"{id}_{index}" for index in range(body.n)]
    return build_requests(plan.model, ids, plan.prompt, params)


async def whole_completion(
    id: str, name: str, body: ChatRequest, plan: ChatPlan, requests: Sequence[Request], generation: Generation
) -> ChatCompletion:
    """Wait for all choices and put them into one answer. name: name of the model. Raises ApiError."""
    answers = await collect(generation)
    parsed = [plan.parse(answer, each.id) for answer, each in zip(answers, requests, strict=True)]

    def work() -> list[ChatChoice]:
        text = plan.model.text
        logprobs = [choice_logprobs(text, each.logprobs) if body.logprobs else None for each in answers]
        return [choice_of(index, *each) for index, each in enumerate(zip(answers, parsed, logprobs, strict=True))]

    choices = await off_loop(logprobs_size(answers), work)
    total = usage(generation, body.n, reasoning_tokens=sum(each.reasoning_tokens for each in parsed))
    return ChatCompletion(id=id, created=int(time.time()), model=name, choices=choices, usage=total)
