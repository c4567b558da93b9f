"""How to sample and when to stop, as clients say it: the fields that the endpoints share, and what they mean."""

from dataclasses import replace
from typing import Any

from msgspec import Struct, field

from api.generation.request_builder import (
    Bias,
    Count,
    MinP,
    Penalty,
    Priority,
    RepetitionPenalty,
    Seed,
    Temperature,
    TopK,
    TopP,
    Wishes,
)


class SamplingFields(Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields that every generating endpoint has under the same names."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: dict[str, Bias] = field(default_factory=dict)
    seed: Seed | None = None
    stop: str | list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    skip_special_tokens: bool = True


class RequestFields(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """Those of the endpoints that answer one request of OpenAI's form or a session's turn."""

    model: str | None = None
    min_tokens: Count = 0
    include_stop_str_in_output: bool = False
    stream: bool = False
    priority: Priority = 0


def sampling_wishes(asked: SamplingFields, **own: Any) -> Wishes:
    """own: the fields of Wishes that the endpoint knows under names of its own."""
    shared = Wishes(
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        min_p=asked.min_p,
        repetition_penalty=asked.repetition_penalty,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        logit_bias=asked.logit_bias,
        seed=asked.seed,
        stop=asked.stop,
        stop_token_ids=asked.stop_token_ids,
        ignore_eos=asked.ignore_eos,
        skip_special_tokens=asked.skip_special_tokens,
    )
    return replace(shared, **own)


def request_wishes(asked: RequestFields, **own: Any) -> Wishes:
    shared = {
        "min_tokens": asked.min_tokens,
        "keep_stop_string": asked.include_stop_str_in_output,
        "priority": asked.priority,
    }
    return sampling_wishes(asked, **shared, **own)
