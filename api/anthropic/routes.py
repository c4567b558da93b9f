"""POST /v1/messages, and its count_tokens."""

import uuid

from aiohttp import web
from msgspec import Struct

from baton.actors.requests import Request
from baton.api import errors
from baton.api.anthropic.conversation import read_conversation
from baton.api.anthropic.errors import error_body
from baton.api.anthropic.reply import PING, Reply, frames
from baton.api.anthropic.request import IGNORED, UNSUPPORTED, MessagesRequest, read_offer, thinking_variables, wanted_in
from baton.api.exchange import REQUEST_ID, answer_json, read_asked, salt_of, submit
from baton.api.generation.answers import collect
from baton.api.generation.chat_prompt import Ending, render
from baton.api.generation.fields import request_params
from baton.api.generation.parsed_answer import ParsedAnswer
from baton.api.generation.request_builder import Prompt, build_request
from baton.api.generation.served_model import ServedModel
from baton.api.generation.tool_choice import grammar_of
from baton.api.generation.tools import ToolUse
from baton.api.parsing import convert
from baton.api.server import SERVER
from baton.api.sse import Framing, stream

routes = web.RouteTableDef()


class TokenCount(Struct):
    input_tokens: int


@routes.post("/v1/messages")
async def create_message(request: web.Request) -> web.StreamResponse:
    server = request.app[SERVER]
    asked = convert(await read_asked(request), MessagesRequest, IGNORED, UNSUPPORTED)
    model = server.ready(asked.model)
    if asked.max_tokens is None:
        raise errors.bad_request("max_tokens is required", "max_tokens", "missing_required_parameter")
    use = await read_offer(model, asked)
    salt = salt_of(request, asked.cache_salt)
    prompt = await read_prompt(model, asked, use, salt)
    id = f"msg_{uuid.uuid4().hex}"
    member = await message_request(model, asked, prompt, use, id, salt)
    with submit(request, [member]) as generation:
        reply = Reply(id, server.name, ParsedAnswer(model, prompt, use), generation, asked.max_tokens == 0)
        if asked.stream:
            framing = Framing(frames, lambda error: error_body(error, request[REQUEST_ID]), PING, b"")
            return await stream(request, generation, reply, server.config.ping_interval, framing=framing)
        [answer] = await collect(generation)
        return answer_json(reply.whole(answer))


@routes.post("/v1/messages/count_tokens")
async def count_tokens(request: web.Request) -> web.Response:
    """As many as an answer's usage has in all of its input tokens."""
    asked = convert(await read_asked(request), MessagesRequest, IGNORED, UNSUPPORTED)
    model = request.app[SERVER].ready(asked.model)
    prompt = await read_prompt(model, asked, await read_offer(model, asked), salt_of(request, asked.cache_salt))
    return answer_json(TokenCount(len(prompt.tokens)))


async def read_prompt(model: ServedModel, asked: MessagesRequest, use: ToolUse, salt: str) -> Prompt:
    """The prompt; the answer goes on in a final message of the assistant. Raises ApiError 400."""
    chat = await read_conversation(model, asked, use.tools)
    last = chat.messages[-1]
    if "tool_calls" in last:
        at = f"messages[{len(asked.messages) - 1}]"
        raise errors.bad_request(f"{at}: calls of tools want their results behind them", at, "invalid_value")
    ending: Ending = "message" if last["role"] == "assistant" else "answer"
    variables = thinking_variables(model, asked) | asked.chat_template_kwargs
    return await render(model, chat.messages, ending, variables, use.tools, chat.beginnings, salt=salt)


async def message_request(
    model: ServedModel, asked: MessagesRequest, prompt: Prompt, use: ToolUse, id: str, salt: str
) -> Request:
    grammar = await grammar_of(model, prompt, use, wanted_in(asked))
    return build_request(
        model,
        id,
        prompt,
        request_params(
            asked,
            max_tokens=asked.max_tokens,
            stop=asked.stop_strings,
            checkpoints=(*asked.checkpoints, *(end for end in prompt.checkpoints if end < len(prompt.tokens))),
            salt=salt,
            grammar=grammar,
            names={"prompt": "messages", "stop": "stop_sequences"},
        ),
    )
