"""The sampling fields of all generating endpoints, with their types and ranges, in one Struct: SamplingFields.

The Struct of each endpoint inherits from it. `request_builder` takes values for the ring's Request from its fields.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct, ValidationError, convert, field

from baton.actors.requests import Keep, Speculation

MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 128

Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
Bias: TypeAlias = Annotated[float, Meta(ge=-100, le=100)]
Count: TypeAlias = Annotated[int, Meta(ge=0, lt=2**31)]
Choices: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
TopLogprobs: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
Priority: TypeAlias = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
Id: TypeAlias = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[!-~]+\Z")]
Salt: TypeAlias = Annotated[str, Meta(max_length=1024)]
KeepHint: TypeAlias = Literal["soon", "never"]


class SamplingFields(Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields that say how to sample and when to stop, under the names that every generating endpoint uses.

    None means the default in the model's generation_config.json, or else the default of the ring's Sampling.
    """

    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None  # 0 and -1: no limit
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10)] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: dict[str, Bias] = field(default_factory=dict)  # keys are token ids, as decimal strings
    seed: int | None = None  # None: a random seed
    stop: str | list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    speculation: Speculation = "auto"  # off: no drafts; otherwise those of one kind, or all that the server makes


class DefaultFields(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """The fields that a model's generation_config.json may set, with the same ranges as for clients."""

    max_new_tokens: Annotated[int, Meta(ge=1)] | None = None


class RequestFields(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """The sampling fields, plus further fields that chat completions, completions, responses and turns share."""

    model: str | None = None
    min_tokens: Count = 0
    include_stop_str_in_output: bool = False
    stream: bool = False
    priority: Priority = 0
    checkpoints: list[int] = field(default_factory=list)  # positions in the prompt where the client wants checkpoints
    keep: KeepHint | None = None  # whether the client will continue from the answer's end: soon, or never
    prompt_cache_key: Annotated[str, Meta(max_length=1024)] | None = None  # names the conversation; implies keep "soon"

    @property
    def keep_hint(self) -> Keep:
        return self.keep or ("soon" if self.prompt_cache_key else "")


class SamplingParams(SamplingFields, kw_only=True):
    """The parameters of one sequence, with the same names for all endpoints: the input of `build_request`."""

    max_tokens: int | None = None  # None: the model's default, or else all that the context length leaves
    min_tokens: int = 0
    keep_stop: bool = False  # the answer's text includes the stop string that ended it
    priority: int = 0
    salt: str = ""
    # The next seven fields have the meaning of the fields with the same names in the ring's Request.
    logprobs: int | None = None
    prompt_logprobs_from: int | None = None
    logprob_ids: tuple[int, ...] = ()
    grammar: str = ""
    checkpoints: tuple[int, ...] = ()
    keep: Keep = ""
    pooled: tuple[int, int] | None = None
    prediction: tuple[int, ...] = ()  # tokens that the client expects in the output
    names: Mapping[str, str] = {}  # the endpoint's names of fields that differ, for error messages

    def name(self, field: str) -> str:
        """Return the endpoint's name of a field, for error messages."""
        return self.names.get(field, field)


def sampling_params(fields: SamplingFields, **own: Any) -> SamplingParams:
    """Copy the sampling fields, and add `own`: the parameters that the endpoint names differently or computes."""
    shared = {name: getattr(fields, name) for name in SamplingFields.__struct_fields__}
    return SamplingParams(**shared | own)


def request_params(fields: RequestFields, **own: Any) -> SamplingParams:
    """Copy the fields of RequestFields, and add `own`: parameters that the endpoint names differently or computes."""
    shared = {
        "min_tokens": fields.min_tokens,
        "keep_stop": fields.include_stop_str_in_output,
        "priority": fields.priority,
        "checkpoints": tuple(fields.checkpoints),
        "keep": fields.keep_hint,
    }
    return sampling_params(fields, **shared | own)


def check_defaults(defaults: Mapping[str, float]) -> None:
    """Raise ValueError if a default of generation_config.json is out of its field's range."""
    for name, value in defaults.items():
        whole = int(value) if isinstance(value, float) and value.is_integer() else value
        try:
            convert({name: whole}, DefaultFields)
        except ValidationError as error:
            raise ValueError(f"generation_config.json: {name} = {value}: {error}") from error
