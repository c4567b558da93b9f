"""POST /v1/messages and POST /v1/messages/count_tokens."""

import uuid

from aiohttp import web
from msgspec import Struct

from baton.actors.requests import Request
from baton.api import errors
from baton.api.anthropic.conversation import read_conversation
from baton.api.anthropic.errors import error_body, unsupported_thread
from baton.api.anthropic.reply import PING, Reply, frames
from baton.api.anthropic.request import IGNORED, UNSUPPORTED, MessagesRequest, read_offer, thinking_variables, wanted_in
from baton.api.exchange import REQUEST_ID, answer_json, read_body, salt_of, submit
from baton.api.generation.answers import collect
from baton.api.generation.chat_plan import ChatInput, ChatPlan, plan_chat, render_input
from baton.api.generation.chat_prompt import Ending, preserving
from baton.api.generation.fields import request_params
from baton.api.generation.request_builder import build_request
from baton.api.generation.served_model import ServedModel
from baton.api.parsing import convert
from baton.api.server import SERVER
from baton.api.sse import Framing, stream

routes = web.RouteTableDef()


class TokenCount(Struct):
    input_tokens: int


@routes.post("/v1/messages")
async def create_message(request: web.Request) -> web.StreamResponse:
    """Answer a conversation, complete or as a stream."""
    server = request.app[SERVER]
    body = await read_request(request)
    model = server.ready(body.model)
    if body.max_tokens is None:
        raise errors.bad_request("max_tokens is required", "max_tokens", "missing_required_parameter")
    salt = salt_of(request, body.cache_salt)
    plan = await plan_chat(model, await read_chat(model, body), salt)
    id = f"msg_{uuid.uuid4().hex}"
    with submit(request, [message_request(body, plan, id, salt)]) as generation:
        reply = Reply(id, server.name, plan.parser(), generation, prompt_only=body.max_tokens == 0)
        if body.stream:
            framing = Framing(frames, lambda error: error_body(error, request[REQUEST_ID]), PING, b"")
            return await stream(request, generation, reply, server.config.ping_interval, framing=framing)
        [answer] = await collect(generation)
        return answer_json(reply.whole(answer))


@routes.post("/v1/messages/count_tokens")
async def count_tokens(request: web.Request) -> web.Response:
    """Count the prompt's tokens. The count equals the sum of the three input token counts in an answer's usage."""
    body = await read_request(request)
    model = request.app[SERVER].ready(body.model)
    prompt = await render_input(model, await read_chat(model, body), salt_of(request, body.cache_salt))
    return answer_json(TokenCount(len(prompt.tokens)))


async def read_request(request: web.Request) -> MessagesRequest:
    """Read the body. Raises ApiError 400."""
    fields = await read_body(request)
    if "thread" in fields:
        raise unsupported_thread()
    return convert(fields, MessagesRequest, IGNORED, UNSUPPORTED)


async def read_chat(model: ServedModel, body: MessagesRequest) -> ChatInput:
    """Read the fields that decide the prompt and the output. Raises ApiError 400.

    If the last message is the assistant's, the prompt leaves it open, and the answer continues it.
    """
    tools = await read_offer(model, body)
    chat = await read_conversation(model, body, tools.tools)
    last = chat.messages[-1]
    if "tool_calls" in last:
        at = f"messages[{len(body.messages) - 1}]"
        message = f"{at}: each tool_use block must be followed by its tool_result in the next message"
        raise errors.bad_request(message, at, "invalid_value")
    variables = thinking_variables(model, body) | preserving(body.preserve_reasoning) | body.chat_template_kwargs
    ending: Ending = "message" if last["role"] == "assistant" else "answer"
    budget = body.thinking.budget_tokens if body.thinking is not None and body.thinking.type == "enabled" else None
    return ChatInput(chat.messages, ending, variables, tools, wanted_in(body), budget, chat.beginnings)


def message_request(body: MessagesRequest, plan: ChatPlan, id: str, salt: str) -> Request:
    """Build the Request for the ring. Raises ApiError 400."""
    # A checkpoint must lie inside the prompt. Near the prompt's end the scheduler makes one anyway.
    marks = [end for end in plan.prompt.checkpoints if end < len(plan.prompt.tokens)]
    return build_request(
        plan.model,
        id,
        plan.prompt,
        request_params(
            body,
            max_tokens=body.max_tokens,
            stop=body.stop_strings,
            checkpoints=(*body.checkpoints, *marks),
            salt=salt,
            grammar=plan.grammar,
            names={"prompt": "messages", "stop": "stop_sequences"},
        ),
    )
