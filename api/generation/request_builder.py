"""From the fields of a request body to the ring's Request: ranges, defaults, limits, seeds."""

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias, TypeVar

from msgspec import Meta

from actors import tokens
from actors.requests import Request, Sampling, Stops
from api import errors
from api.generation.engine import Engine

T = TypeVar("T")

THREAD_ABOVE = 20_000
SEEDS = 2**63
GREEDY_BELOW = 1e-5
MAX_STOPS = 64
MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 128

Temperature: TypeAlias = Annotated[float, Meta(ge=0, le=100)]
TopP: TypeAlias = Annotated[float, Meta(gt=0, le=1)]
TopK: TypeAlias = Annotated[int, Meta(ge=-1, lt=2**31)]
MinP: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
RepetitionPenalty: TypeAlias = Annotated[float, Meta(gt=0, le=10)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
Seed: TypeAlias = int
Bias: TypeAlias = Annotated[float, Meta(ge=-100, le=100)]
Count: TypeAlias = Annotated[int, Meta(ge=0, lt=2**31)]
Choices: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
TopLogprobs: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
Priority: TypeAlias = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
Id: TypeAlias = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[!-~]+$")]
Salt: TypeAlias = Annotated[str, Meta(max_length=1024)]


@dataclass(frozen=True)
class Prompt:
    """tokens: the prompt; text: as the client wrote it, if it did; message_ends: where its messages end."""

    tokens: list[int]
    text: str | None = None
    message_ends: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """How to sample and when to stop, whatever the endpoint calls it. None: the model's default.

    names: what the endpoint calls a field, where that differs, for error messages.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[str, float] | None = None
    seed: int | None = None
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    keep_stop_string: bool = False
    skip_special_tokens: bool = True
    priority: int = 0
    salt: str = ""
    logprobs: int | None = None
    prompt_logprobs_from: int | None = None
    names: Mapping[str, str] | None = None

    def name(self, field: str) -> str:
        return (self.names or {}).get(field, field)


def draft(engine: Engine, id: str, prompt: Prompt, wishes: Wishes) -> Request:
    """The ring's request. Raises ApiError 400 naming the field.

    max_tokens is cut to what the model's length leaves; None asks for all of that, and 0 for one token, which the
    endpoint drops (scoring a prompt needs a step).
    """
    room = engine.max_model_len - len(prompt.tokens)
    if not prompt.tokens:
        raise errors.bad_request("the prompt is empty", wishes.name("prompt"), "empty_prompt")
    if room < 1:
        message = (
            f"the prompt has {len(prompt.tokens)} tokens; with at least one of the answer it must fit into "
            f"{engine.max_model_len}"
        )
        raise errors.bad_request(message, wishes.name("prompt"), "context_length_exceeded")
    check_ids(engine, prompt.tokens, wishes.name("prompt"))
    start = wishes.prompt_logprobs_from
    if start is not None and start > len(prompt.tokens):
        message = f"it starts at {start}, beyond the prompt's {len(prompt.tokens)} tokens"
        raise errors.bad_request(message, wishes.name("prompt_logprobs_from"), "invalid_value")
    return Request(
        id=id,
        tokens=tokens.pack(prompt.tokens),
        prompt_len=len(prompt.tokens),
        sampling=sampling(engine, wishes),
        stops=stops(engine, wishes, room),
        priority=wishes.priority,
        salt=wishes.salt,
        message_ends=prompt.message_ends,
        logprobs=wishes.logprobs,
        prompt_logprobs_from=start if start != len(prompt.tokens) else None,
        skip_special_tokens=wishes.skip_special_tokens,
    )


def sampling(engine: Engine, wishes: Wishes) -> Sampling:
    """Fields that are not given come from the model's generation_config; the seed is drawn here."""
    defaults = engine.text.generation_defaults

    def choose(given: float | None, name: str, otherwise: float) -> float:
        return given if given is not None else float(defaults.get(name, otherwise))

    temperature = choose(wishes.temperature, "temperature", 1.0)
    return Sampling(
        temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
        top_k=max(0, int(choose(wishes.top_k, "top_k", 0))),
        top_p=choose(wishes.top_p, "top_p", 1.0),
        min_p=choose(wishes.min_p, "min_p", 0.0),
        repetition_penalty=choose(wishes.repetition_penalty, "repetition_penalty", 1.0),
        presence_penalty=wishes.presence_penalty,
        frequency_penalty=wishes.frequency_penalty,
        logit_bias=biases(engine, wishes),
        seed=(secrets.randbits(63) if wishes.seed is None else wishes.seed) % SEEDS,
    )


def biases(engine: Engine, wishes: Wishes) -> dict[int, float]:
    name = wishes.name("logit_bias")
    result = {}
    for key, bias in (wishes.logit_bias or {}).items():
        if not (key.isascii() and key.isdigit() and int(key[:19]) < engine.vocab_size):
            raise errors.bad_request(f"{key!r} is not a token id below {engine.vocab_size}", name, "invalid_value")
        result[int(key)] = bias
    return result


def stops(engine: Engine, wishes: Wishes, room: int) -> Stops:
    asked = wishes.max_tokens
    if asked is not None and wishes.min_tokens > asked:
        message = f"{wishes.min_tokens} is more than {wishes.name('max_tokens')}, {asked}"
        raise errors.bad_request(message, wishes.name("min_tokens"), "invalid_value")
    limit = min(room, max(asked if asked is not None else default_length(engine, room), 1))
    strings = (wishes.stop,) if isinstance(wishes.stop, str) else tuple(wishes.stop)
    if "" in strings or len(strings) > MAX_STOPS:
        message = "a stop string cannot be empty" if "" in strings else f"at most {MAX_STOPS} stop strings"
        raise errors.bad_request(message, wishes.name("stop"), "invalid_value")
    check_ids(engine, wishes.stop_token_ids, wishes.name("stop_token_ids"))
    ends = () if wishes.ignore_eos else tuple(id for id in engine.text.eos_ids if id < engine.vocab_size)
    return Stops(
        max_tokens=limit,
        min_tokens=min(wishes.min_tokens, limit),
        strings=strings,
        token_ids=tuple(dict.fromkeys((*wishes.stop_token_ids, *ends))),
        keep_stop_string=wishes.keep_stop_string,
    )


def default_length(engine: Engine, room: int) -> int:
    """What the model's generation_config says, else all that is left."""
    return int(engine.text.generation_defaults.get("max_new_tokens", room))


def check_ids(engine: Engine, ids: Sequence[int], field: str) -> None:
    """Raise ApiError 400 unless all are token ids of the model."""
    if ids and not (min(ids) >= 0 and max(ids) < engine.vocab_size):
        wrong = next(i for i in ids if not 0 <= i < engine.vocab_size)
        raise errors.bad_request(f"{wrong} is not a token id below {engine.vocab_size}", field, "invalid_value")


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Run `work` in a thread if `size`, its input's characters, would keep the event loop waiting."""
    return work() if size <= THREAD_ABOVE else await asyncio.to_thread(work)


async def encode(engine: Engine, text: str, add_special_tokens: bool = True) -> Prompt:
    ids = await off_loop(len(text), lambda: engine.text.encode(text, add_special_tokens=add_special_tokens))
    return Prompt(ids, text)


def seed_of(seed: int | None, index: int) -> int | None:
    """The seed of choice `index`: different for each, and the same each time."""
    return None if seed is None else seed + index
