"""POST /generate as in SGLang. As in SGLang, each event of a stream has the whole answer so far."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import msgspec
from aiohttp import web
from msgspec import Meta, Struct, field
from msgspec.structs import replace

from baton.actors.requests import Output, Request, TokenLogprob
from baton.api import errors
from baton.api.exchange import answer_json, check_batch, new_id, ring_id, salt_of, submit
from baton.api.generation.answers import Answer, collect, drop_output, finite, logprobs_size, token_text
from baton.api.generation.fields import (
    Choices,
    Count,
    Id,
    KeepHint,
    Priority,
    Salt,
    SamplingFields,
    SamplingParams,
    TopLogprobs,
    sampling_params,
)
from baton.api.generation.offload import off_loop
from baton.api.generation.outputs import Generation
from baton.api.generation.request_builder import Conditions, Prompt, build_requests, conditions, encode_all
from baton.api.generation.served_model import ServedModel, Text
from baton.api.generation.structured import SGLANG, GrammarWriters, of_kinds
from baton.api.parsing import Unsupported, convert
from baton.api.server import SERVER
from baton.api.sse import stream

DEFAULT_MAX_NEW_TOKENS = 128
MAX_LOGPROB_IDS = 64
IGNORED = frozenset({"log_metrics", "background", "no_logs", "custom_labels", "conversation_id", "stream_interval"})
UNSUPPORTED: Unsupported = {
    "image_data": ([],),
    "video_data": ([],),
    "audio_data": ([],),
    "modalities": ([],),
    "input_embeds": ([],),
    "lora_path": (),
    "lora_id": (),
    "custom_logit_processor": (),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
}
UNSUPPORTED_SAMPLING: Unsupported = {
    "structural_tag": (),
    "stop_regex": ([],),
    "custom_params": ({},),
    "beam_width": (1,),
}
IGNORED_SAMPLING = frozenset({"spaces_between_special_tokens", "stream_interval"})
# This endpoint's names of fields, by their different names in SamplingParams, for error messages.
NAMES = {
    "prompt": "text",
    "max_tokens": "sampling_params.max_new_tokens",
    "min_tokens": "sampling_params.min_new_tokens",
    "stop": "sampling_params.stop",
    "stop_token_ids": "sampling_params.stop_token_ids",
    "logit_bias": "sampling_params.logit_bias",
    "prompt_logprobs_from": "logprob_start_len",
    "logprob_ids": "token_ids_logprob",
}


Start: TypeAlias = Annotated[int, Meta(ge=-1, lt=2**31)]


class GenerateRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /generate: one prompt or a batch of prompts, in `text` or `input_ids`.

    In a batch, a field that may be a list has one entry for each prompt, or one value for all prompts.
    """

    model: str | None = None
    text: str | list[str] | None = None
    input_ids: list[Any] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] = field(default_factory=dict)
    rid: Id | list[Id] | None = None
    return_logprob: bool | list[bool] = False
    logprob_start_len: Start | list[Start] = -1  # index of the first prompt token to score; -1: none
    top_logprobs_num: TopLogprobs | list[TopLogprobs] = 0
    token_ids_logprob: list[int | list[int] | None] = field(default_factory=list)
    return_text_in_logprobs: bool = False
    stream: bool = False
    priority: Priority = 0
    checkpoints: list[int | list[int] | None] = field(default_factory=list)
    keep: KeepHint | list[KeepHint | None] | None = None
    extra_key: Salt = ""  # SGLang's name for cache_salt
    cache_salt: Salt = ""


class GenerateParams(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """The field sampling_params of the body."""

    max_new_tokens: Count = DEFAULT_MAX_NEW_TOKENS
    min_new_tokens: Count = 0
    sampling_seed: int | None = None
    n: Choices = 1
    no_stop_trim: bool = False
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None


@dataclass(frozen=True)
class Item:
    """One sequence to generate."""

    request: Request
    scoring: bool  # max_new_tokens is 0: only the prompt's log probabilities are returned


async def generate(request: web.Request, body: GenerateRequest) -> web.StreamResponse:
    """Answer a POST /generate without a session."""
    server = request.app[SERVER]
    model = server.ready(body.model)
    check_batch(request, len(body.text or body.input_ids or ()) if is_batch(body) else 1)
    items = await read_items(model, body, salt_of(request, salt_in(body)))
    alone = len(items) == 1 and not is_batch(body)
    own = [replace(item.request, id=ring_id(request, item.request.id)) for item in items]
    with submit(request, own) as generation:
        writer = GenerateWriter(model.text, body, items, generation)
        if body.stream:
            return await stream(request, generation, GenerateEncoder(writer, alone), server.config.ping_interval)
        answers = await collect(generation)
        results = await off_loop(
            logprobs_size(answers), lambda: [writer.result(index, answer) for index, answer in enumerate(answers)]
        )
        return answer_json(results[0] if alone else results)


def is_batch(body: GenerateRequest) -> bool:
    if body.text is not None:
        return isinstance(body.text, list)
    return bool(body.input_ids) and isinstance((body.input_ids or [0])[0], list)


async def read_prompts(model: ServedModel, body: GenerateRequest) -> list[Prompt]:
    """Read the prompts of a batch, or the single prompt of another body. Raises ApiError 400."""
    if (body.text is None) == (body.input_ids is None):
        raise errors.bad_request("give one of text and input_ids", "text", "invalid_value")
    if body.text is not None:
        prompts = await encode_all(model, body.text if isinstance(body.text, list) else [body.text], field="text")
    else:
        try:
            rows = msgspec.convert(body.input_ids if is_batch(body) else [body.input_ids], list[list[int]])
        except msgspec.ValidationError:
            message = "expected a list of token ids, or a list of such lists"
            raise errors.bad_request(f"input_ids: {message}", "input_ids", "invalid_value") from None
        prompts = [Prompt(ids) for ids in rows]
    if not prompts:
        raise errors.bad_request("the batch is empty", "text", "invalid_value")
    return prompts


async def read_items(model: ServedModel, body: GenerateRequest, salt: str) -> list[Item]:
    """Read all sequences: n for the first prompt, n for the second, and so on. Raises ApiError: 400, 503."""
    prompts = await read_prompts(model, body)
    size = len(prompts)
    params = broadcast_params(body.sampling_params, size)
    logprob = broadcast(body.return_logprob, size, "return_logprob")
    start = broadcast(body.logprob_start_len, size, "logprob_start_len")
    top = broadcast(body.top_logprobs_num, size, "top_logprobs_num")
    rids, ids = read_rids(body, size), read_logprob_ids(body, size)
    checkpoints = lists_of_each(body.checkpoints, body, size, "checkpoints", "positions")
    keep = broadcast(body.keep, size, "keep")
    items, shared = list[Item](), dict[int, Conditions]()  # by the params that they belong to
    for i, prompt in enumerate(prompts):
        (own, at), has_logprobs = params[i], bool(logprob[i])
        grammar = await model.grammars.written(wanted_in(own, at))
        begin = start[i] if has_logprobs and start[i] >= 0 else None
        logprob_ids, tops = (ids[i], top[i]) if has_logprobs else ((), None)
        neutral = params_of(own, body, salt, tops, begin, logprob_ids, grammar)
        neutral = replace(neutral, checkpoints=checkpoints[i], keep=keep[i] or "")
        if id(own) not in shared:
            shared[id(own)] = conditions(model, neutral)
        names = [rids[i]] if own.n == 1 else [f"{rids[i]}_{choice}" for choice in range(own.n)]
        requests = build_requests(model, names, prompt, neutral, shared[id(own)])
        items += [Item(request, own.max_new_tokens == 0) for request in requests]
    return items


def wanted_in(params: GenerateParams, at: str) -> GrammarWriters:
    """Return the grammar writers of the constraints in `params`. at: the path of `params` in the body."""
    names = {kind: f"{at}.{name}" for kind, name in SGLANG.items()}
    return of_kinds(params.json_schema, params.regex, None, params.ebnf, names)


def salt_in(body: GenerateRequest) -> str:
    return body.cache_salt or body.extra_key


def params_of(
    params: GenerateParams,
    body: GenerateRequest,
    salt: str,
    logprobs: int | None,
    start: int | None,
    ids: tuple[int, ...],
    grammar: str,
) -> SamplingParams:
    """Return the parameters of a prompt's choices.

    logprobs: number of alternatives to report for each token; None: no log probabilities.
    start: the first prompt token whose log probability is reported.
    ids: tokens whose log probabilities are always reported.
    """
    seed = params.sampling_seed if params.sampling_seed is not None else params.seed
    return sampling_params(
        params,
        max_tokens=params.max_new_tokens,
        min_tokens=params.min_new_tokens,
        seed=seed,
        keep_stop=params.no_stop_trim,
        priority=body.priority,
        salt=salt,
        logprobs=logprobs,
        prompt_logprobs_from=start,
        logprob_ids=ids,
        grammar=grammar,
        names=NAMES if body.text is not None else {**NAMES, "prompt": "input_ids"},
    )


def read_sampling(params: dict[str, Any], at: str) -> GenerateParams:
    """Read sampling_params, in which null means that a field is absent. Raises ApiError 400."""
    fields = {name: value for name, value in params.items() if value is not None}
    return convert(fields, GenerateParams, IGNORED_SAMPLING, UNSUPPORTED_SAMPLING, at)


def broadcast_params(params: dict[str, Any] | list[dict[str, Any]], size: int) -> list[tuple[GenerateParams, str]]:
    """Return the sampling_params of each prompt, with their path in the body. Raises ApiError 400."""
    if isinstance(params, dict):
        return [(read_sampling(params, "sampling_params"), "sampling_params")] * size
    if len(params) != size:
        message = f"sampling_params: {len(params)} entries for {size} prompts"
        raise errors.bad_request(message, "sampling_params", "invalid_value")
    places = [f"sampling_params[{index}]" for index in range(size)]
    return [(read_sampling(each, at), at) for each, at in zip(params, places, strict=True)]


def broadcast(value: Any, size: int, name: str) -> list[Any]:
    """Return one value for each of `size` prompts: a list as it is, another value repeated. Raises ApiError 400."""
    if not isinstance(value, list):
        return [value] * size
    if len(value) != size:
        raise errors.bad_request(f"{name}: {len(value)} entries for {size} prompts", name, "invalid_value")
    return value


def read_rids(body: GenerateRequest, size: int) -> list[str]:
    """Return each prompt's request id: from the client's list, or one id, with the prompt's index in a batch."""
    if isinstance(body.rid, list):
        rids: list[str] = broadcast(body.rid, size, "rid")
        return rids
    rid = body.rid or new_id("gen")
    return [f"{rid}_{index}" for index in range(size)] if is_batch(body) else [rid]


def read_logprob_ids(body: GenerateRequest, size: int) -> list[tuple[int, ...]]:
    """Return for each prompt the token ids whose log probabilities it asks for. Raises ApiError 400."""
    found = lists_of_each(body.token_ids_logprob, body, size, "token_ids_logprob", "token ids")
    if max(map(len, found)) > MAX_LOGPROB_IDS:
        message = f"token_ids_logprob: at most {MAX_LOGPROB_IDS} ids for a prompt"
        raise errors.bad_request(message, "token_ids_logprob", "invalid_value")
    return found


def lists_of_each(
    values: list[int | list[int] | None], body: GenerateRequest, size: int, name: str, what: str
) -> list[tuple[int, ...]]:
    """Return the list of integers of each prompt. Raises ApiError 400.

    values: one list for all prompts or, in a batch, a list for each prompt.
    name: name of the field. what: meaning of the integers, for error messages.
    """
    is_shared = all(isinstance(number, int) for number in values)
    lists = [values] * size if is_shared or not is_batch(body) else broadcast(values, size, name)
    try:
        return msgspec.convert([each if each is not None else () for each in lists], list[tuple[int, ...]])
    except msgspec.ValidationError:
        message = f"expected a list of {what} or, in a batch, a list of such lists"
        raise errors.bad_request(f"{name}: {message}", name, "invalid_value") from None


class GenerateWriter:
    """Writer of answers in SGLang's format."""

    def __init__(self, text: Text, body: GenerateRequest, items: Sequence[Item], generation: Generation) -> None:
        self._text = text
        self._body = body
        self._items = items
        self._generation = generation

    def result(self, index: int, answer: Answer) -> dict[str, Any]:
        """Return the answer of one sequence, which may be incomplete so far."""
        item, member = self._items[index], self._generation.members[index]
        if item.scoring and answer.finish_reason is not None:
            drop_output([answer])
        count = 0 if item.scoring else member.completion_tokens
        meta: dict[str, Any] = {
            "id": item.request.id,
            "finish_reason": finish(answer, count),
            "prompt_tokens": member.prompt_tokens,
            "completion_tokens": count,
            "cached_tokens": member.cached_tokens,
            "matched_tokens": member.matched_tokens,
            "lost": member.miss_reason,
            "weight_version": "default",
        }
        if answer.finish_reason is not None:
            meta["e2e_latency"] = self._generation.age
        if item.request.logprobs is not None:
            meta["input_token_logprobs"] = [self._row(item) for item in answer.prompt_logprobs]
            meta["output_token_logprobs"] = [self._row(item) for item in answer.logprobs]
            if item.request.logprobs:
                meta["input_top_logprobs"] = [self._top(item) for item in answer.prompt_logprobs]
                meta["output_top_logprobs"] = [self._top(item) for item in answer.logprobs]
            if ids := item.request.logprob_ids:
                meta["input_token_ids_logprobs"] = [self._chosen(ids, item) for item in answer.prompt_logprobs]
                meta["output_token_ids_logprobs"] = [self._chosen(ids, item) for item in answer.logprobs]
        return {"text": answer.text, "output_ids": answer.ids, "meta_info": meta}

    def _row(self, item: TokenLogprob) -> list[Any]:
        return self._entry(item.token, item.logprob)

    def _top(self, item: TokenLogprob) -> list[list[Any]] | None:
        return [self._entry(id, logprob) for id, logprob in item.top] if item.logprob is not None else None

    def _chosen(self, ids: tuple[int, ...], item: TokenLogprob) -> list[list[Any]] | None:
        if item.logprob is None:
            return None
        return [self._entry(id, logprob) for id, logprob in zip(ids, item.id_logprobs, strict=True)]

    def _entry(self, id: int, logprob: float | None) -> list[Any]:
        text = token_text(self._text, id) if self._body.return_text_in_logprobs else None
        return [None if logprob is None else finite(logprob), id, text]


def finish(answer: Answer, count: int) -> dict[str, Any] | None:
    """Return the finish_reason in SGLang's format. count: number of tokens in the answer."""
    match answer.finish_reason:
        case None:
            return None
        case "stop":
            return {"type": "stop", "matched": answer.stop_reason}
        case "length":
            return {"type": "length", "length": count}
        case _:
            return {"type": "abort", "message": "the request was aborted"}


class GenerateEncoder:
    """Encoder of a stream, in which each event has the whole answer so far and, in a batch, the sequence's index."""

    def __init__(self, writer: GenerateWriter, alone: bool) -> None:
        self._writer = writer
        self._alone = alone
        self._answers: dict[int, Answer] = {}

    def opening(self) -> list[dict[str, Any]]:
        return []

    def delta(self, index: int, output: Output) -> list[dict[str, Any]]:
        if not output.tokens and output.finish_reason is None:
            return []
        answer = self._answers.setdefault(index, Answer())
        answer.add(output)
        result = self._writer.result(index, answer)
        return [result if self._alone else {**result, "index": index}]

    def closing(self) -> list[dict[str, Any]]:
        return []
