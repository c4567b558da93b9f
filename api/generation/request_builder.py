"""Builds the ring's Request from a prompt and sampling parameters: defaults, limits, seeds."""

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

SEEDS = 2**63
GREEDY_BELOW = 1e-5
MAX_STOPS = 64
MAX_CHECKPOINTS = 4
MAX_DIGITS = 10


@dataclass(frozen=True)
class Prompt:
    """tokens: the prompt; text: as the client wrote it, if it did; message_ends: where its messages end.

    in_reasoning: reasoning begins in it, so that the answer goes on with that. checkpoints: positions at which the
    client asked for one.
    """

    tokens: list[int]
    text: str | None = None
    message_ends: tuple[int, ...] = ()
    in_reasoning: bool = False
    checkpoints: tuple[int, ...] = ()


def build_request(model: ServedModel, id: str, prompt: Prompt, params: SamplingParams) -> Request:
    """The ring's request. Raises ApiError 400 naming the field.

    max_tokens is cut to what the model's length leaves; None asks for all of that, and 0 for one token, which the
    endpoint drops (scoring a prompt needs a step).
    """
    room = model.max_model_len - len(prompt.tokens)
    if not prompt.tokens:
        raise errors.bad_request("the prompt is empty", params.name("prompt"), "empty_prompt")
    if room < 1:
        raise too_long(model, f"{len(prompt.tokens)} tokens", params.name("prompt"))
    check_ids(model, prompt.tokens, params.name("prompt"))
    start = params.prompt_logprobs_from
    if start is not None and start > len(prompt.tokens):
        message = f"it starts at {start}, beyond the prompt's {len(prompt.tokens)} tokens"
        raise errors.bad_request(message, params.name("prompt_logprobs_from"), "invalid_value")
    check_ids(model, params.logprob_ids, params.name("logprob_ids"))
    return Request(
        id=id,
        tokens=tokens.pack(prompt.tokens),
        prompt_len=len(prompt.tokens),
        sampling=sampling(model, params),
        stops=stops(model, params, room),
        priority=params.priority,
        salt=params.salt,
        message_ends=prompt.message_ends,
        logprobs=params.logprobs,
        prompt_logprobs_from=start if start != len(prompt.tokens) else None,
        logprob_ids=params.logprob_ids,
        skip_special_tokens=params.skip_special_tokens,
        grammar=params.grammar,
        checkpoints=checkpoints(params, len(prompt.tokens)),
        keep=params.keep,
    )


def sampling(model: ServedModel, params: SamplingParams) -> Sampling:
    """Each field of the ring's by its name: the client's value, else the model's default, else Sampling's own."""
    names = set(Sampling.__struct_fields__)
    defaults = {name: float(value) for name, value in model.text.generation_defaults.items() if name in names}
    given = {name: value for name in names if (value := getattr(params, name)) is not None}
    chosen = Sampling(**defaults | given)
    return replace(
        chosen,
        temperature=chosen.temperature if chosen.temperature >= GREEDY_BELOW else 0.0,
        top_k=max(0, int(chosen.top_k)),
        logit_bias=biases(model, params),
        seed=(secrets.randbits(63) if params.seed is None else params.seed) % SEEDS,
    )


def biases(model: ServedModel, params: SamplingParams) -> dict[int, float]:
    name = params.name("logit_bias")
    result = {}
    for key, bias in params.logit_bias.items():
        id = int(key) if key.isascii() and key.isdigit() and len(key) <= MAX_DIGITS else -1
        if not 0 <= id < model.vocab_size:
            raise errors.bad_request(f"{key[:20]!r} is not a token id below {model.vocab_size}", name, "invalid_value")
        result[id] = bias
    return result


def stops(model: ServedModel, params: SamplingParams, room: int) -> Stops:
    asked = params.max_tokens
    if asked is not None and params.min_tokens > asked:
        message = f"{params.min_tokens} is more than {params.name('max_tokens')}, {asked}"
        raise errors.bad_request(message, params.name("min_tokens"), "invalid_value")
    limit = min(room, max(asked if asked is not None else default_length(model, room), 1))
    strings = (params.stop,) if isinstance(params.stop, str) else tuple(params.stop)
    if "" in strings or len(strings) > MAX_STOPS:
        message = "a stop string cannot be empty" if "" in strings else f"at most {MAX_STOPS} stop strings"
        raise errors.bad_request(message, params.name("stop"), "invalid_value")
    check_ids(model, params.stop_token_ids, params.name("stop_token_ids"))
    ends = () if params.ignore_eos else tuple(id for id in model.text.eos_ids if id < model.vocab_size)
    return Stops(
        max_tokens=limit,
        min_tokens=min(params.min_tokens, limit),
        strings=strings,
        token_ids=tuple(dict.fromkeys((*params.stop_token_ids, *ends))),
        keep_stop=params.keep_stop,
    )


def checkpoints(params: SamplingParams, length: int) -> tuple[int, ...]:
    """Where the client asks for a state, in order. Raises ApiError 400 unless these lie inside the prompt."""
    positions, name = sorted(set(params.checkpoints)), params.name("checkpoints")
    if len(positions) > MAX_CHECKPOINTS:
        raise errors.bad_request(f"at most {MAX_CHECKPOINTS} checkpoints", name, "invalid_value")
    wrong = next((position for position in positions if not 0 < position < length), None)
    if wrong is not None:
        message = f"{wrong} does not lie inside the prompt, which has {length} tokens"
        raise errors.bad_request(message, name, "invalid_value")
    return tuple(positions)


def default_length(model: ServedModel, room: int) -> int:
    """What the model's generation_config says, else all that is left."""
    return int(model.text.generation_defaults.get("max_new_tokens", room))


def check_ids(model: ServedModel, ids: Sequence[int], field: str) -> None:
    """Raise ApiError 400 unless all are token ids of the model."""
    if ids and not (min(ids) >= 0 and max(ids) < model.vocab_size):
        wrong = next(i for i in ids if not 0 <= i < model.vocab_size)
        raise errors.bad_request(f"{wrong} is not a token id below {model.vocab_size}", field, "invalid_value")


async def encode(model: ServedModel, text: str, add_special_tokens: bool = True, field: str = "prompt") -> Prompt:
    """Raises ApiError 400, before it is encoded, for a text that cannot fit."""
    [prompt] = await encode_all(model, [text], add_special_tokens, field)
    return prompt


async def encode_all(
    model: ServedModel, texts: Sequence[str], add_special_tokens: bool = True, field: str = "prompt"
) -> list[Prompt]:
    """`encode` of several, which keep the event loop waiting no longer than one."""
    for text in texts:
        check_length(model, len(text), field)

    def work() -> list[Prompt]:
        return [Prompt(model.text.encode(text, add_special_tokens=add_special_tokens), text) for text in texts]

    return await off_loop(sum(map(len, texts)), work)


def check_length(model: ServedModel, characters: int, field: str) -> None:
    """Raise ApiError 400 for a text of so many characters, which are at least as many bytes, if it cannot fit."""
    most = model.text.max_token_bytes
    if most is not None and characters > most * model.max_model_len:
        raise too_long(model, f"at least {characters // most} tokens", field)


def too_long(model: ServedModel, length: str, field: str) -> errors.ApiError:
    """Clients know an overlong prompt by these words."""
    message = (
        f"This model's maximum context length is {model.max_model_len} tokens. However, the prompt has {length}: "
        "with at least one of the answer it is longer than the model's context length."
    )
    return errors.bad_request(message, field, "context_length_exceeded")
