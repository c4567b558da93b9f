"""Planted bugs that only requests of an unusual form can show, and how to plant one."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Annotated, Any

from msgspec import Meta
from msgspec.structs import replace

from baton.actors.requests import Stops
from baton.api import parsing
from baton.api.generation import messages, request_builder
from baton.api.generation.fields import SamplingParams
from baton.api.generation.served_model import ServedModel
from baton.api.openai import chat, completions
from baton.api.responses import input_items
from baton.api.sessions.session import OpenTurn
from tests.simulation.planting import Patch, planting


def a_bias_is_checked_by_its_first_digits(patch: Patch) -> None:
    """Planted bug: only the first 19 digits of a token id in logit_bias are checked."""

    def biases(model: ServedModel, params: SamplingParams) -> dict[int, float]:
        for key in params.logit_bias:
            request_builder.check_ids(model, [int(key[:19]) if key.isdigit() else -1], "logit_bias")
        return {int(key): bias for key, bias in params.logit_bias.items()}

    patch(request_builder, "biases", biases)


def stop_tokens_are_not_checked(patch: Patch) -> None:
    """Planted bug: stop token ids may be outside of the vocabulary."""

    def stops(model: ServedModel, params: SamplingParams) -> Stops:
        plain = real(model, replace(params, stop_token_ids=[]))
        return replace(plain, token_ids=(*params.stop_token_ids, *plain.token_ids))

    real = request_builder.stops
    patch(request_builder, "stops", stops)


def token_ids_are_not_checked(patch: Patch) -> None:
    """Planted bug: no token ids of a request are checked against the vocabulary."""
    patch(request_builder, "check_ids", lambda *_: None)


def negative_token_ids_are_accepted(patch: Patch) -> None:
    """Planted bug: negative token ids pass the check."""

    def check_ids(model: ServedModel, ids: list[int], field: str) -> None:
        real(model, [id for id in ids if id >= 0], field)

    real = request_builder.check_ids
    patch(request_builder, "check_ids", check_ids)


def alternatives_have_no_bounds(patch: Patch) -> None:
    """Planted bug: top_logprobs may be any integer."""

    class Unbounded(chat.ChatRequest):
        top_logprobs: int = 0

    patch(chat, "ChatRequest", Unbounded)


def alternatives_have_no_upper_bound(patch: Patch) -> None:
    """Planted bug: top_logprobs may be arbitrarily large."""

    class Unbounded(chat.ChatRequest):
        top_logprobs: Annotated[int, Meta(ge=0)] = 0

    patch(chat, "ChatRequest", Unbounded)


def min_tokens_may_exceed_max_tokens(patch: Patch) -> None:
    """Planted bug: min_tokens above max_tokens is lowered to max_tokens instead of refused."""

    def stops(model: ServedModel, params: SamplingParams) -> Stops:
        return real(model, replace(params, min_tokens=min(params.min_tokens, params.max_tokens or 2**31)))

    real = request_builder.stops
    patch(request_builder, "stops", stops)


def a_seed_has_any_size(patch: Patch) -> None:
    """Planted bug: a seed reaches the device without being reduced to the range of int64."""
    real = request_builder.ring_seed
    patch(request_builder, "ring_seed", lambda seed: real(None) if seed is None else seed)


def a_role_may_be_anything(patch: Patch) -> None:
    """Planted bug: only roles that are strings are checked."""
    real = messages.read_role
    patch(messages, "read_role", lambda role, at: real(role, at) if isinstance(role, str) else messages.ROLES[role])


def a_number_in_a_query_is_any_digits(patch: Patch) -> None:
    """Planted bug: a number in a query may consist of characters that only str.isdigit accepts, such as "²"."""

    def read_number(query: Any, name: str, what: str) -> int | None:
        text = query.get(name, "")
        return int(text) if text.isdigit() and len(text) <= parsing.MAX_DIGITS else None

    patch(input_items, "read_number", read_number)


def recursion_errors_of_json_are_not_caught(patch: Patch) -> None:
    """Planted bug: JSON that is nested too deeply raises a RecursionError that is not handled."""
    patch(parsing, "RecursionError", MemoryError)


def an_empty_list_is_a_list_of_prompts(patch: Patch) -> None:
    """Planted bug: the prompt of a completion may be an empty list."""

    class Unbounded(completions.CompletionRequest):
        prompt: str | list[Any]

    patch(completions, "CompletionRequest", Unbounded)


def a_refused_turn_never_ends(patch: Patch) -> None:
    """Planted bug: a turn that was refused before its generation began stays open."""

    def settle(turn: OpenTurn) -> None:
        if turn._generation is not None:
            real(turn)

    real = OpenTurn.settle
    patch(OpenTurn, "settle", settle)


PLANTED: dict[str, Callable[[Patch], None]] = {
    name: value for name, value in vars().items() if getattr(value, "__module__", "") == __name__
}


def planted(name: str) -> AbstractContextManager[None]:
    """Plant the bug of this name while the block runs."""
    return planting(PLANTED[name])
