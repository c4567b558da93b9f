"""POST /v1/completions."""

import time
from collections.abc import Sequence
from typing import Annotated, Any

from aiohttp import web
from msgspec import UNSET, Meta, Struct, UnsetType

from baton.actors.requests import Output, Request, TokenLogprob
from baton.api import errors
from baton.api.exchange import answer_json, check_batch, new_id, read_body, salt_of, submit
from baton.api.generation.answers import Answer, Usage, collect, drop_output, finite, logprobs_size, token_text, usage
from baton.api.generation.fields import Choices, Count, Salt, TopLogprobs, request_params
from baton.api.generation.offload import off_loop
from baton.api.generation.outputs import Generation
from baton.api.generation.request_builder import Prompt, build_requests, conditions, encode, encode_all
from baton.api.generation.served_model import ServedModel, Text
from baton.api.generation.structured import StructuredFields, wanted_in
from baton.api.openai.fields import IGNORED, UNSUPPORTED, StreamOptions
from baton.api.parsing import convert
from baton.api.server import SERVER, Server
from baton.api.sse import stream

routes = web.RouteTableDef()

DEFAULT_MAX_TOKENS = 16


class CompletionRequest(StructuredFields, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: str | Annotated[list[Any], Meta(min_length=1)]  # text, token ids, or a list of texts or of lists of ids
    max_tokens: Count = DEFAULT_MAX_TOKENS
    n: Choices = 1
    best_of: int | None = None  # must equal n
    echo: bool = False  # the answer begins with the prompt
    add_special_tokens: bool = True
    logprobs: TopLogprobs | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Salt = ""

    @property
    def scoring(self) -> bool:
        """Whether the client asks only for log probabilities of the prompt."""
        return self.max_tokens == 0


class CompletionLogprobs(Struct):
    """Log probabilities of tokens, in lists with one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]  # where each token begins in the choice's text, in characters


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Completion(Struct, kw_only=True):
    """A complete answer, or one chunk of a stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


@routes.post("/v1/completions")
async def completions(request: web.Request) -> web.StreamResponse:
    """Complete one prompt or several. Answer when all are complete, or as a stream."""
    server = request.app[SERVER]
    body = convert(await read_body(request), CompletionRequest, IGNORED, UNSUPPORTED)
    model = server.ready(body.model)
    check(body)
    id = new_id("cmpl")
    check_batch(request, body.n * (len(body.prompt) if holds_many(body.prompt) else 1))
    prompts = await read_prompts(model, body.prompt, body.add_special_tokens, "prompt")
    grammar = await model.grammars.written(wanted_in(body))
    requests = completion_requests(model, body, prompts, id, salt_of(request, body.cache_salt), grammar)
    with submit(request, requests) as generation:
        writer = ChoiceWriter(model.text, body, prompts)
        if body.stream:
            encoder = CompletionEncoder(id, server, body, writer, generation)
            return await stream(request, generation, encoder, server.config.ping_interval)
        answers = await collect(generation)
        if body.scoring:
            drop_output(answers)
        choices = await off_loop(
            logprobs_size(answers), lambda: [writer.whole(index, answer) for index, answer in enumerate(answers)]
        )
        total = usage(generation, body.n, body.scoring)
        return answer_json(Completion(id=id, created=int(time.time()), model=server.name, choices=choices, usage=total))


def check(body: CompletionRequest) -> None:
    """Check rules that concern several fields. Raises ApiError 400."""
    if body.best_of is not None and body.best_of != body.n:
        raise errors.unsupported("best_of", "other than n is not supported")
    if body.scoring and not body.echo:
        raise errors.bad_request("max_tokens: 0 needs echo: true", "max_tokens", "invalid_value")


async def read_prompts(
    model: ServedModel, prompt: str | list[Any], add_special_tokens: bool, field: str
) -> list[Prompt]:
    """Read one prompt or several, as strings or as lists of token ids. Raises ApiError 400, which names `field`."""
    if isinstance(prompt, str):
        return [await encode(model, prompt, add_special_tokens, field)]
    if all(isinstance(item, str) for item in prompt):
        return await encode_all(model, prompt, add_special_tokens, field)
    if is_tokens(prompt):
        return [Prompt(prompt)]
    if all(isinstance(item, list) and is_tokens(item) for item in prompt):
        return [Prompt(item) for item in prompt]
    message = f"{field} must be a string, a list of strings, a list of token ids, or a list of such lists"
    raise errors.bad_request(message, field, "invalid_value")


def holds_many(prompt: str | list[Any]) -> bool:
    """Return whether `prompt` is a list of prompts, rather than text or a list of token ids."""
    return isinstance(prompt, list) and type(prompt[0]) is not int


def is_tokens(items: list[Any]) -> bool:
    return all(type(item) is int for item in items)


def completion_requests(
    model: ServedModel, body: CompletionRequest, prompts: Sequence[Prompt], id: str, salt: str, grammar: str
) -> list[Request]:
    """Build the Requests for the ring: n for the first prompt, then n for the second, and so on."""
    params = request_params(
        body,
        max_tokens=body.max_tokens,
        salt=salt,
        logprobs=body.logprobs,
        prompt_logprobs_from=0 if body.echo and body.logprobs is not None else None,
        grammar=grammar,
    )
    count, shared = len(prompts) * body.n, conditions(model, params)
    ids = [id] if count == 1 else [f"{id}_{index}" for index in range(count)]
    return [
        request
        for at, prompt in zip(range(0, count, body.n), prompts, strict=True)
        for request in build_requests(model, ids[at : at + body.n], prompt, params, shared)
    ]


class ChoiceWriter:
    """Writer of the texts and log probabilities of choices, which tracks the text offset of each choice."""

    def __init__(self, text: Text, body: CompletionRequest, prompts: Sequence[Prompt]) -> None:
        self._text = text
        self._body = body
        self._prompts = prompts
        self._offsets = [0] * (len(prompts) * body.n)

    def echo(self, index: int, prompt_logprobs: Sequence[TokenLogprob]) -> tuple[str, CompletionLogprobs | None]:
        """Return the text and log probabilities of a choice's prompt, which the field `echo` puts before the answer."""
        prompt = self._prompts[index // self._body.n]
        text = prompt.text if prompt.text is not None else self._text.decode(prompt.tokens, skip_special_tokens=False)
        return text, self.logprobs(index, prompt_logprobs)

    def whole(self, index: int, answer: Answer) -> CompletionChoice:
        text, items = answer.text, answer.logprobs
        if self._body.echo:
            before, _ = self.echo(index, ())
            text, items = before + text, [*answer.prompt_logprobs, *items]
        return CompletionChoice(index, text, self.logprobs(index, items), answer.finish_reason, answer.stop_reason)

    def logprobs(self, index: int, items: Sequence[TokenLogprob]) -> CompletionLogprobs | None:
        """Return the log probabilities of newly arrived tokens in OpenAI's format; None if the client wants none."""
        if self._body.logprobs is None:
            return None
        result = CompletionLogprobs([], [], [], [])
        for item in items:
            token = token_text(self._text, item.token)
            result.tokens.append(token)
            result.text_offset.append(self._offsets[index])
            self._offsets[index] += len(token)
            if item.logprob is None:
                result.token_logprobs.append(None)
                result.top_logprobs.append(None)
            else:
                result.token_logprobs.append(finite(item.logprob))
                top = {token_text(self._text, id): finite(logprob) for id, logprob in item.top}
                # Like OpenAI, list the drawn token too, even if it is not among the most likely tokens.
                top.setdefault(token, finite(item.logprob))
                result.top_logprobs.append(top)
        return result


class CompletionEncoder:
    """Encoder of a streamed completion."""

    def __init__(
        self, id: str, server: Server, body: CompletionRequest, writer: ChoiceWriter, generation: Generation
    ) -> None:
        self._id = id
        self._model = server.name
        self._created = int(time.time())
        self._body = body
        self._writer = writer
        self._generation = generation
        # Choices whose prompt is not sent yet. It waits for the first output, which has the prompt's log probabilities.
        self._echo_due = set(range(len(generation.members))) if body.echo else set()
        options = body.stream_options or StreamOptions()
        self._usage = options.include_usage or options.continuous_usage_stats
        self._continuous = options.continuous_usage_stats

    def opening(self) -> list[Completion]:
        return []

    def delta(self, index: int, output: Output) -> list[Completion]:
        chunks = []
        if index in self._echo_due and (output.tokens or output.finish_reason is not None):
            self._echo_due.discard(index)
            chunks.append(self._chunk(CompletionChoice(index, *self._writer.echo(index, output.prompt_logprobs))))
        reason, stop_reason = output.finish_reason, output.stop_reason if output.finish_reason == "stop" else None
        if self._body.scoring:
            if reason is not None:
                chunks.append(self._chunk(CompletionChoice(index, "", None, "length")))
        elif output.text or output.logprobs or reason is not None:
            logprobs = self._writer.logprobs(index, output.logprobs)
            chunks.append(self._chunk(CompletionChoice(index, output.text, logprobs, reason, stop_reason)))
        return chunks

    def closing(self) -> list[Completion]:
        if not self._usage:
            return []
        total = usage(self._generation, self._body.n, self._body.scoring)
        return [Completion(id=self._id, created=self._created, model=self._model, choices=[], usage=total)]

    def _chunk(self, choice: CompletionChoice) -> Completion:
        shown: Usage | UnsetType | None = None if self._usage else UNSET
        if self._continuous:
            shown = usage(self._generation, self._body.n, self._body.scoring)
        return Completion(id=self._id, created=self._created, model=self._model, choices=[choice], usage=shown)
