"""POST /v1/embeddings."""

import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from aiohttp import web
from msgspec import Meta, Struct

from baton.actors.requests import Request
from baton.api import errors
from baton.api.exchange import answer_json, check_batch, new_id, read_body, salt_of, submit
from baton.api.generation.answers import Answer, PromptTokensDetails, collect, usage
from baton.api.generation.fields import Priority, Salt, SamplingParams
from baton.api.generation.offload import off_loop
from baton.api.generation.request_builder import Prompt, build_request
from baton.api.generation.served_model import ServedModel
from baton.api.openai.completions import holds_many, read_prompts
from baton.api.parsing import convert
from baton.api.server import SERVER
from baton.models.loading.pooling import EmbeddingRecipe

routes = web.RouteTableDef()

IGNORED = frozenset({"user"})
NAMES = {"prompt": "input"}
NUMBER_SIZE = 10  # encoding one number takes as long as so many characters of text


class EmbeddingRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/embeddings."""

    input: str | Annotated[list[Any], Meta(min_length=1)]  # as the prompt of completions
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Meta(ge=1)] | None = None  # keep so many numbers of each embedding
    prompt_name: str | None = None  # the model's prompt to put before each text; None: its default prompt, if any
    add_special_tokens: bool = True
    priority: Priority = 0
    cache_salt: Salt = ""


class InputEmbedding(Struct, tag_field="object", tag="embedding"):
    """One input's embedding."""

    index: int
    embedding: list[float] | str


class EmbeddingUsage(Struct):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class EmbeddingList(Struct, tag_field="object", tag="list"):
    """The answer."""

    data: list[InputEmbedding]
    model: str
    usage: EmbeddingUsage


@routes.post("/v1/embeddings")
async def embeddings(request: web.Request) -> web.Response:
    """Return an embedding of each input."""
    server = request.app[SERVER]
    body = convert(await read_body(request), EmbeddingRequest, IGNORED)
    model = server.ready(body.model)
    recipe, most = model.embedding, model.hidden_size
    if recipe.refusal:
        raise errors.bad_request(recipe.refusal, code="embeddings_not_supported")
    if body.dimensions is not None and body.dimensions > most:
        message = f"dimensions: {body.dimensions} is more than the model's {most}"
        raise errors.bad_request(message, "dimensions", "invalid_value")
    check_batch(request, len(body.input) if holds_many(body.input) else 1)
    prompt = prompt_of(recipe, body.prompt_name)
    prompts = await read_inputs(model, body, prompt)
    skipped = 0 if recipe.pools_prompt else prompt_length(model, prompt, body.add_special_tokens)
    spans = [pooled_span(recipe, each, skipped) for each in prompts]
    id, salt = new_id("embd"), salt_of(request, body.cache_salt)
    requests = [
        embedding_request(model, f"{id}_{index}" if len(prompts) > 1 else id, each, span, salt, body.priority)
        for index, (each, span) in enumerate(zip(prompts, spans, strict=True))
    ]
    with submit(request, requests) as generation:
        answers = await collect(generation)
        total = usage(generation, scoring=True)
    if not all(answer.pooled for answer in answers):
        raise errors.aborted()
    counts = EmbeddingUsage(total.prompt_tokens, total.prompt_tokens, total.prompt_tokens_details)
    size = NUMBER_SIZE * (body.dimensions or most) * len(answers)
    data = await off_loop(size, lambda: write(answers, body, recipe.normalizes))
    return answer_json(EmbeddingList(data, server.name, counts))


def prompt_of(recipe: EmbeddingRecipe, name: str | None) -> str:
    """Return the text to put before each input. Raises ApiError 400 for an unknown name."""
    name = recipe.default_prompt if name is None else name
    if name is None:
        return ""
    if name not in recipe.prompts:
        known = ", ".join(recipe.prompts) or "none"
        raise errors.bad_request(f"prompt_name: {name!r} is not a prompt of the model ({known})", "prompt_name")
    return recipe.prompts[name]


async def read_inputs(model: ServedModel, body: EmbeddingRequest, prompt: str) -> list[Prompt]:
    """Read the inputs, with the prompt before those that are texts. Raises ApiError 400."""
    inputs = body.input
    if isinstance(inputs, str):
        inputs = prompt + inputs
    elif all(isinstance(item, str) for item in inputs):
        inputs = [prompt + item for item in inputs]
    return await read_prompts(model, inputs, body.add_special_tokens, "input")


def prompt_length(model: ServedModel, prompt: str, add_special_tokens: bool) -> int:
    """Return how many tokens the prompt alone has, without one that the tokenizer adds at the end of any text.

    sentence-transformers leaves out as many tokens of each input, although the last one may hold letters of the input.
    """
    if not prompt:
        return 0
    alone, empty = (model.text.encode(text, add_special_tokens=add_special_tokens) for text in (prompt, ""))
    return len(alone) - (alone[-1:] == empty[-1:])


def pooled_span(recipe: EmbeddingRecipe, input: Prompt, skipped: int) -> tuple[int, int]:
    """Return the tokens of an input whose hidden states are averaged. skipped: tokens that a mean leaves out."""
    end = len(input.tokens)
    match recipe.pooling:
        case "last":
            return end - 1, end
        case "cls":
            return 0, 1
        case "mean":
            return min(skipped, end - 1) if input.text is not None else 0, end


def embedding_request(
    model: ServedModel, id: str, input: Prompt, span: tuple[int, int], salt: str, priority: int
) -> Request:
    """Build the Request for the ring. It draws one token, because that ends a prompt, and the answer drops it.

    States of prompts that pool all their tokens are not kept: no other such request could resume from them.
    """
    resumes = span[0] > 0
    params = SamplingParams(
        temperature=0.0, max_tokens=1, ignore_eos=True, speculation="off", names=NAMES, priority=priority, salt=salt,
        pooled=span, keep="" if resumes else "never",
    )  # fmt: skip
    return build_request(model, id, input, params)


def write(answers: Sequence[Answer], body: EmbeddingRequest, normalizes: bool) -> list[InputEmbedding]:
    """Return the embeddings in the format that the client asks for."""
    vectors = np.stack([np.frombuffer(answer.pooled, np.float32) for answer in answers])[:, : body.dimensions]
    if normalizes:
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        vectors = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
    if body.encoding_format == "base64":
        return [
            InputEmbedding(index, base64.b64encode(vector.tobytes()).decode()) for index, vector in enumerate(vectors)
        ]
    return [InputEmbedding(index, vector.tolist()) for index, vector in enumerate(vectors)]
