"""Streams that another engine can continue: comments in them for a router, and the resumption of such a stream.

A draw depends on seed and position alone. So an engine that gets the same request, the seeds and the tokens that have
reached the client draws the tokens that the first engine would have drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from aiohttp import web
from msgspec import Struct
from msgspec.structs import replace

from baton.actors.requests import Output, Request
from baton.actors.results.actor import PROMPT_TAIL
from baton.actors.tokens import WIDTH, Tokens, unpack
from baton.api import errors
from baton.api.generation.outputs import Generation
from baton.api.generation.request_builder import SEEDS
from baton.api.generation.served_model import ServedModel
from baton.api.parsing import RESUME, RESUMPTION

ROUTED = "baton-routed"  # the header of requests that come from a router
RESUMABLE = "baton-resumable"  # the header of streams with comments for the router
EVENTS_A_TOKEN = 16  # maximum events of a response per token; the response's opening counts as a token
COMMENT = b": baton "  # beginning of a comment for the router, which ends with an empty line


class Begun(Struct, frozen=True, kw_only=True, tag_field="event", tag="begun"):
    """The first comment of a stream, after its opening."""

    ids: list[str]  # ids of the ring's requests, one for each sequence
    seeds: list[int]
    limits: list[int]  # maximum tokens of each sequence, limited by the engine's context
    weights: str  # ServedModel.weights
    created: int = 0  # creation time of a response, in seconds of Unix time


class SentPart(Struct, frozen=True, array_like=True):
    """Tokens of one sequence (one request of the ring)."""

    index: int  # index of the sequence
    tokens: Tokens
    shown: int  # characters of the sequence's text, up to and including these tokens, that a client can have seen
    ended: bool = False  # whether the sequence has ended


class TokensSent(Struct, frozen=True, kw_only=True, tag_field="event", tag="sent"):
    """A comment after events: the tokens from which the events were made."""

    parts: list[SentPart]
    events: int = 0  # number of a response's events so far


class Resumption(Struct, frozen=True, kw_only=True):
    """The beginning of a stream that its client already has."""

    begun: Begun
    parts: list[SentPart]  # all tokens so far, one part for each sequence, in order
    events: int = 0  # number of a response's events so far


def begun(model: ServedModel, generation: Generation, created: int = 0) -> bytes:
    """Return the comment after the opening of a stream."""
    requests = [member.request for member in generation.members]
    return comment(
        Begun(
            ids=[each.id for each in requests],
            seeds=[each.sampling.seed for each in requests],
            limits=[each.stops.max_tokens for each in requests],
            weights=model.weights,
            created=created,
        )
    )


def passed(generation: Generation, batch: Sequence[tuple[int, Output]]) -> bytes:
    """Return the comment after the events of these outputs. Call it before anything is awaited after `next`."""
    members = generation.members
    parts = [SentPart(i, each.tokens, members[i].shown, each.finish_reason is not None) for i, each in batch]
    return comment(TokensSent(parts=parts))


def comment(value: Begun | TokensSent) -> bytes:
    return COMMENT + msgspec.json.encode(value) + b"\n\n"


@dataclass(frozen=True)
class Earlier:
    """The output of a sequence that its client already has."""

    tokens: Tokens
    text: str


def read_resumption(request: web.Request) -> Resumption | None:
    """Return the stream that a request resumes; None if it resumes none. Raises ApiError 400."""
    value = request.get(RESUMPTION)
    if value is None:
        return None
    try:
        return msgspec.convert(value, Resumption)
    except msgspec.ValidationError as error:
        raise errors.bad_request(f"{RESUME}: {error}", RESUME, "invalid_value") from None


def resumed(
    model: ServedModel, requests: Sequence[Request], resumption: Resumption
) -> tuple[list[Request], list[Earlier]]:
    """Return the requests with the seeds and limits of the first engine, and the output that the client has.

    Raises ApiError 400 if the resumption does not match the requests, if this engine has other weights, or if its
    context is too short for the limits, so that the stream would end earlier here.
    """
    parts, seeds, limits = resumption.parts, resumption.begun.seeds, resumption.begun.limits
    if not len(parts) == len(seeds) == len(limits) == len(requests) or [part.index for part in parts] != [
        *range(len(parts))
    ]:
        raise errors.bad_request(f"{RESUME}: expected {len(requests)} sequences", RESUME, "invalid_value")
    if not all(0 <= seed < SEEDS for seed in seeds):
        raise errors.bad_request(f"{RESUME}: the seeds cannot be of an engine", RESUME, "invalid_value")
    tokens = sum(len(part.tokens) // WIDTH for part in parts)
    if not 0 <= resumption.events <= EVENTS_A_TOKEN * (tokens + 1):
        raise errors.bad_request(f"{RESUME}: so few tokens have no {resumption.events} events", RESUME, "invalid_value")
    if resumption.begun.weights != model.weights:
        raise errors.bad_request(f"{RESUME}: the first engine has other weights", RESUME, "model_mismatch")
    found = list[Earlier]()
    for request, part, limit in zip(requests, parts, limits, strict=True):
        if request.stops.max_tokens < limit:
            raise errors.bad_request(f"{RESUME}: the context is too short", RESUME, "context_length_exceeded")
        ids = unpack(part.tokens) if len(part.tokens) % WIDTH == 0 else [-1]
        if not all(0 <= id < model.vocab_size for id in ids) or len(ids) >= limit:
            raise errors.bad_request(f"{RESUME}: the tokens cannot be an output", RESUME, "invalid_value")
        tail = unpack(request.tokens)[-PROMPT_TAIL:]
        text = model.text.detokenizer(tail, request.skip_special_tokens).push(ids)
        found.append(Earlier(part.tokens, text[: part.shown]))
    begun = [
        replace(each, sampling=replace(each.sampling, seed=seed), stops=replace(each.stops, max_tokens=limit))
        for each, seed, limit in zip(requests, seeds, limits, strict=True)
    ]
    return begun, found
