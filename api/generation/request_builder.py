"""Building of the ring's Request from a prompt and sampling parameters, with defaults, limits and seeds."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from baton.actors import tokens
from baton.actors.requests import Request, Sampling, Stops
from baton.api import errors
from baton.api.generation.fields import SamplingParams
from baton.api.generation.offload import off_loop
from baton.api.generation.served_model import ServedModel
from baton.models.text.panics import TokenizerError

SEEDS = 2**63
GREEDY_BELOW = 1e-5  # a lower temperature means greedy decoding
MAX_STOPS = 64
MAX_CHECKPOINTS = 4
MAX_DIGITS = 10  # maximum digits of a token id


@dataclass(frozen=True)
class Prompt:
    """A prompt as tokens, and positions in these tokens."""

    tokens: list[int]
    text: str | None = None  # the client's text; None for a chat or for token ids
    message_ends: tuple[int, ...] = ()  # positions where messages end
    in_reasoning: bool = False  # the prompt ends inside reasoning, which the output continues
    checkpoints: tuple[int, ...] = ()  # positions where the client asks for a checkpoint


@dataclass(frozen=True)
class Conditions:
    """The sampling and stop conditions that all requests of a call share, except for seeds and limits.

    They can be large, so they are built once for all prompts and choices.
    """

    sampling: Sampling
    stops: Stops  # without the limits that depend on a prompt (`limited`)


def conditions(model: ServedModel, params: SamplingParams) -> Conditions:
    """Return the conditions that `params` ask for. Raises ApiError 400, which names the wrong field."""
    return Conditions(sampling(model, params), stops(model, params))


def build_requests(
    model: ServedModel, ids: Sequence[str], prompt: Prompt, params: SamplingParams, shared: Conditions | None = None
) -> list[Request]:
    """Build the Requests of a prompt's choices, one for each id. Raises ApiError 400, as `build_request`.

    Choices get different seeds. If the client sets a seed, a repeated call gets the same ones.
    """
    first = build_request(model, ids[0], prompt, params, shared)
    seeds = (params.seed + index if params.seed is not None else None for index in range(len(ids)))
    return [
        replace(first, id=id, sampling=replace(first.sampling, seed=ring_seed(seed)))
        for id, seed in zip(ids, seeds, strict=True)
    ]


def build_request(
    model: ServedModel, id: str, prompt: Prompt, params: SamplingParams, shared: Conditions | None = None
) -> Request:
    """Build the Request for the ring. Raises ApiError 400, which names the wrong field.

    `max_tokens` is limited to what the context length leaves. A `max_tokens` of 0 becomes 1, because scoring a prompt
    needs a step; the endpoint drops the token of that step.

    shared: the result of `conditions` for these params, if the caller has it already.
    """
    room = model.max_model_len - len(prompt.tokens)
    if not prompt.tokens:
        raise errors.bad_request("the prompt is empty", params.name("prompt"), "empty_prompt")
    if room < 1:
        raise too_long(model, f"{len(prompt.tokens)} tokens", params.name("prompt"))
    check_ids(model, prompt.tokens, params.name("prompt"))
    start = params.prompt_logprobs_from
    if start is not None and start > len(prompt.tokens):
        name = params.name("prompt_logprobs_from")
        message = f"{name}: {start} is beyond the prompt's {len(prompt.tokens)} tokens"
        raise errors.bad_request(message, name, "invalid_value")
    check_ids(model, params.logprob_ids, params.name("logprob_ids"))
    check_ids(model, params.prediction, "prediction")
    chosen = shared if shared is not None else conditions(model, params)
    return Request(
        id=id,
        tokens=tokens.pack(prompt.tokens),
        prompt_len=len(prompt.tokens),
        sampling=chosen.sampling,
        stops=limited(chosen.stops, model, params, room),
        priority=params.priority,
        salt=params.salt,
        message_ends=prompt.message_ends,
        logprobs=params.logprobs,
        prompt_logprobs_from=start if start != len(prompt.tokens) else None,
        pooled=params.pooled,
        logprob_ids=params.logprob_ids,
        skip_special_tokens=params.skip_special_tokens,
        grammar=params.grammar,
        checkpoints=checkpoints(params, len(prompt.tokens)),
        keep=params.keep,
        speculation=params.speculation,
        prediction=tokens.pack(params.prediction),
    )


def sampling(model: ServedModel, params: SamplingParams) -> Sampling:
    """Build the ring's Sampling. Each field is the client's value, else the model's default, else Sampling's."""
    names = set(Sampling.__struct_fields__)
    defaults = {name: float(value) for name, value in model.text.generation_defaults.items() if name in names}
    values = {name: value for name in names if (value := getattr(params, name)) is not None}
    chosen = Sampling(**defaults | values)
    return replace(
        chosen,
        temperature=chosen.temperature if chosen.temperature >= GREEDY_BELOW else 0.0,
        top_k=max(0, int(chosen.top_k)),
        logit_bias=biases(model, params),
        seed=ring_seed(params.seed),
    )


def ring_seed(seed: int | None) -> int:
    """Return the ring's seed for a client's seed: that seed modulo SEEDS, or a random seed if it is None."""
    return (secrets.randbits(63) if seed is None else seed) % SEEDS


def biases(model: ServedModel, params: SamplingParams) -> dict[int, float]:
    """Return logit_bias with its keys, decimal strings, as token ids. Raises ApiError 400."""
    name = params.name("logit_bias")
    result = {}
    for key, bias in params.logit_bias.items():
        id = int(key) if key.isascii() and key.isdigit() and len(key) <= MAX_DIGITS else -1
        if not 0 <= id < model.vocab_size or key != str(id):
            message = f"{name}: {key[:20]!r} is not a token id below {model.vocab_size}"
            raise errors.bad_request(message, name, "invalid_value")
        result[id] = bias
    return result


def stops(model: ServedModel, params: SamplingParams) -> Stops:
    """Build the stop conditions, without the limits that depend on the prompt. Raises ApiError 400."""
    most = params.max_tokens
    if most is not None and params.min_tokens > most:
        name = params.name("min_tokens")
        message = f"{name}: {params.min_tokens} is more than {params.name('max_tokens')}, {most}"
        raise errors.bad_request(message, name, "invalid_value")
    strings = (params.stop,) if isinstance(params.stop, str) else tuple(params.stop)
    if "" in strings or len(strings) > MAX_STOPS:
        name = params.name("stop")
        problem = "a stop string cannot be empty" if "" in strings else f"at most {MAX_STOPS} stop strings"
        raise errors.bad_request(f"{name}: {problem}", name, "invalid_value")
    check_ids(model, params.stop_token_ids, params.name("stop_token_ids"))
    ends = () if params.ignore_eos else tuple(id for id in model.text.eos_ids if id < model.vocab_size)
    ids = tuple(dict.fromkeys((*params.stop_token_ids, *ends)))
    if params.min_tokens > 0 and len(ids) == model.vocab_size:
        name = params.name("min_tokens")
        raise errors.bad_request(f"{name}: every token ends the output, so none can be drawn", name, "invalid_value")
    return Stops(max_tokens=0, strings=strings, token_ids=ids, keep_stop=params.keep_stop)


def limited(stops: Stops, model: ServedModel, params: SamplingParams, room: int) -> Stops:
    """Return stop conditions with their limits. room: tokens left for the answer in the context."""
    most = params.max_tokens if params.max_tokens is not None else default_length(model, room)
    limit = min(room, max(most, 1))
    return replace(stops, max_tokens=limit, min_tokens=min(params.min_tokens, limit))


def checkpoints(params: SamplingParams, length: int) -> tuple[int, ...]:
    """Return the sorted positions where the client asks for a checkpoint. Raises ApiError 400 for invalid ones."""
    positions, name = sorted(set(params.checkpoints)), params.name("checkpoints")
    if len(positions) > MAX_CHECKPOINTS:
        message = f"{name}: at most {MAX_CHECKPOINTS} positions, got {len(positions)}"
        raise errors.bad_request(message, name, "invalid_value")
    wrong = next((position for position in positions if not 0 < position < length), None)
    if wrong is not None:
        message = f"{name}: position {wrong} is not inside the prompt, which has {length} tokens"
        raise errors.bad_request(message, name, "invalid_value")
    return tuple(positions)


def default_length(model: ServedModel, room: int) -> int:
    """Return the max_new_tokens of the model's generation_config, else `room`."""
    return int(model.text.generation_defaults.get("max_new_tokens", room))


def check_ids(model: ServedModel, ids: Sequence[int], field: str) -> None:
    """Raise ApiError 400 unless all `ids` are token ids of the model."""
    if ids and not (min(ids) >= 0 and max(ids) < model.vocab_size):
        wrong = next(i for i in ids if not 0 <= i < model.vocab_size)
        raise errors.bad_request(f"{field}: {wrong} is not a token id below {model.vocab_size}", field, "invalid_value")


async def encode(model: ServedModel, text: str, add_special_tokens: bool = True, field: str = "prompt") -> Prompt:
    """Tokenize a text. Raises ApiError 400, without tokenizing, for a text that cannot fit into the model's context."""
    [prompt] = await encode_all(model, [text], add_special_tokens, field)
    return prompt


async def encode_all(
    model: ServedModel, texts: Sequence[str], add_special_tokens: bool = True, field: str = "prompt"
) -> list[Prompt]:
    """Tokenize several texts, in a thread if they are long in sum.

    Raises ApiError 400 for a text that cannot fit, or on which the tokenizer fails.
    """
    for text in texts:
        check_length(model, len(text), field)

    def work() -> list[Prompt]:
        return [Prompt(model.text.encode(text, add_special_tokens=add_special_tokens), text) for text in texts]

    try:
        return await off_loop(sum(map(len, texts)), work)
    except TokenizerError as error:
        raise tokenizer_failed(error, field) from None


def tokenizer_failed(error: TokenizerError, field: str) -> errors.ApiError:
    return errors.bad_request(f"{field}: {error}", field, "tokenizer_error")


def check_length(model: ServedModel, characters: int, field: str) -> None:
    """Raise ApiError 400 if a text of this length cannot fit into the model's context, however it is tokenized.

    A text has at least as many bytes as characters, and no token stands for more than `max_token_bytes`.
    """
    most = model.text.max_token_bytes
    if most is not None and characters > most * model.max_model_len:
        raise too_long(model, f"at least {characters // most} tokens", field)


def too_long(model: ServedModel, length: str, field: str) -> errors.ApiError:
    """Return the error for a prompt that is too long. Clients recognize parts of its wording.

    length: the length of the prompt, with its unit.
    """
    message = (
        f"This model's maximum context length is {model.max_model_len} tokens. However, the prompt has {length}: "
        "with at least one token of the answer it is longer than the model's context length."
    )
    return errors.bad_request(message, field, "context_length_exceeded")
