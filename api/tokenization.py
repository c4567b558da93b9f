"""POST /tokenize and /detokenize, with the fields and answers of both vLLM and SGLang; vLLM's /tokenizer_info."""

from typing import Annotated, Any

from aiohttp import web
from msgspec import Meta, Struct, field

from baton.api import errors
from baton.api.exchange import answer_json, salt_of
from baton.api.generation.answers import token_text
from baton.api.generation.chat_prompt import read_ending, render
from baton.api.generation.messages import read_messages
from baton.api.generation.offload import off_loop
from baton.api.generation.request_builder import check_ids, encode
from baton.api.generation.tools import read_tool, read_tools
from baton.api.parsing import convert, read_object
from baton.api.server import SERVER

routes = web.RouteTableDef()


class TokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /tokenize, with either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    tools: list[Any] = field(default_factory=list)
    return_token_strs: bool = False


@routes.post("/tokenize")
async def tokenize(request: web.Request) -> web.Response:
    """Tokenize a prompt, or the rendered prompt of a chat."""
    body = convert(await read_object(request), TokenizeRequest)
    model = request.app[SERVER].ready(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise errors.bad_request("give one of prompt and messages", "prompt", "invalid_value")
    if body.prompt is not None:
        prompt = await encode(model, body.prompt, body.add_special_tokens)
    else:
        messages = await read_messages(model, body.messages or [])
        ending = read_ending(body.add_generation_prompt, body.continue_final_message)
        tools = await read_tools(model, body.tools, read_tool)
        prompt = await render(model, messages, ending, body.chat_template_kwargs, tools, salt=salt_of(request))
    answer: dict[str, Any] = {
        "tokens": prompt.tokens,
        "count": len(prompt.tokens),
        "max_model_len": model.max_model_len,
    }
    if body.return_token_strs:
        ids = prompt.tokens
        answer["token_strs"] = await off_loop(len(ids) * 10, lambda: [token_text(model.text, id) for id in ids])
    return answer_json(answer)


class DetokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    tokens: list[int]
    model: str | None = None
    skip_special_tokens: bool = False


@routes.post("/detokenize")
async def detokenize(request: web.Request) -> web.Response:
    body = convert(await read_object(request), DetokenizeRequest)
    model = request.app[SERVER].ready(body.model)
    check_ids(model, body.tokens, "tokens")
    ids, skip = body.tokens, body.skip_special_tokens
    text = await off_loop(len(ids), lambda: model.text.decode(ids, skip_special_tokens=skip))
    return answer_json({"prompt": text, "text": text})


@routes.get("/tokenizer_info")
async def tokenizer_info(request: web.Request) -> web.Response:
    """Return the tokenizer's configuration and chat template, with which a client can tokenize by itself."""
    return web.json_response(request.app[SERVER].ready().text.tokenizer_info)
