"""The fields of a request for tokens: one table, from which the endpoints' Structs and the ring's parameters are made.

An endpoint's Struct inherits the table, so that its types are the ranges that clients may use; what the ring gets is
taken from it by name (request_builder).
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct, ValidationError, convert, field

from baton.actors.requests import Keep

MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 128

Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
Bias: TypeAlias = Annotated[float, Meta(ge=-100, le=100)]
Count: TypeAlias = Annotated[int, Meta(ge=0, lt=2**31)]
Choices: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
TopLogprobs: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
Priority: TypeAlias = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
Id: TypeAlias = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[!-~]+$")]
Salt: TypeAlias = Annotated[str, Meta(max_length=1024)]
KeepHint: TypeAlias = Literal["soon", "never"]


class SamplingFields(Struct, forbid_unknown_fields=True, kw_only=True):
    """The table: how to sample and when to stop, under the names that every generating endpoint has.

    None: the model's default, which its generation_config says, else the ring's Sampling.
    """

    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10)] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: dict[str, Bias] = field(default_factory=dict)
    seed: int | None = None
    stop: str | list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    skip_special_tokens: bool = True


class DefaultFields(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """What a model's generation_config.json may set: what clients may."""

    max_new_tokens: Annotated[int, Meta(ge=1)] | None = None


class RequestFields(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """The sampling fields, and what chat completions, completions, responses and turns have in common besides.

    checkpoints: positions of the prompt at which the client asks for a state. keep: whether it will go on from the end
    soon, or never; one that names its conversation with a prompt_cache_key will soon.
    """

    model: str | None = None
    min_tokens: Count = 0
    include_stop_str_in_output: bool = False
    stream: bool = False
    priority: Priority = 0
    checkpoints: list[int] = field(default_factory=list)
    keep: KeepHint | None = None
    prompt_cache_key: Annotated[str, Meta(max_length=1024)] | None = None

    @property
    def keep_hint(self) -> Keep:
        return self.keep or ("soon" if self.prompt_cache_key else "")


class SamplingParams(SamplingFields, kw_only=True):
    """What is asked of one sequence, under the same names for all endpoints; `build_request` reads it.

    max_tokens: None for the model's default, else all that is left. logprobs, prompt_logprobs_from, logprob_ids,
    grammar, checkpoints, keep: as in the ring's Request. names: what the endpoint calls a field where that differs, for
    error messages.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    keep_stop: bool = False
    priority: int = 0
    salt: str = ""
    logprobs: int | None = None
    prompt_logprobs_from: int | None = None
    logprob_ids: tuple[int, ...] = ()
    grammar: str = ""
    checkpoints: tuple[int, ...] = ()
    keep: Keep = ""
    names: Mapping[str, str] = {}

    def name(self, field: str) -> str:
        return self.names.get(field, field)


def sampling_params(asked: SamplingFields, **own: Any) -> SamplingParams:
    """own: the fields of SamplingParams that the endpoint names or computes itself."""
    shared = {name: getattr(asked, name) for name in SamplingFields.__struct_fields__}
    return SamplingParams(**shared | own)


def request_params(asked: RequestFields, **own: Any) -> SamplingParams:
    shared = {
        "min_tokens": asked.min_tokens,
        "keep_stop": asked.include_stop_str_in_output,
        "priority": asked.priority,
        "checkpoints": tuple(asked.checkpoints),
        "keep": asked.keep_hint,
    }
    return sampling_params(asked, **shared | own)


def check_defaults(defaults: Mapping[str, float]) -> None:
    """ValueError for a default of generation_config.json that is out of the field's range."""
    for name, value in defaults.items():
        whole = int(value) if isinstance(value, float) and value.is_integer() else value
        try:
            convert({name: whole}, DefaultFields)
        except ValidationError as error:
            raise ValueError(f"generation_config.json: {name} = {value}: {error}") from error


def seed_of(seed: int | None, index: int) -> int | None:
    """The seed of choice `index`: different for each, and the same each time."""
    return None if seed is None else seed + index
