"""Complete answers, collected from the outputs of the ring's requests, and token counts for answers and log lines.

A *member* is one request of a generation; a generation holds the requests of one HTTP call (`outputs.py`).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from baton.actors import tokens
from baton.actors.requests import Output, TokenLogprob
from baton.api.generation.outputs import Generation, Member
from baton.api.generation.served_model import Text

LEAST_LOGPROB = -9999.0  # stands for -inf, which JSON cannot express
TOKEN_SIZE = 10  # decoding one token takes as long as encoding this many characters


@dataclass
class Answer:
    """The joined outputs of one request (a member of a generation) so far."""

    texts: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    pooled: bytes = b""  # as in Output
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # the stop string or token id that ended the answer, if one did

    def add(self, output: Output) -> None:
        """Append the next output of the request."""
        self.texts.append(output.text)
        self.ids += tokens.unpack(output.tokens)
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs
        self.pooled = output.pooled or self.pooled
        self.finish_reason = output.finish_reason
        if output.finish_reason == "stop":
            self.stop_reason = output.stop_reason

    @property
    def text(self) -> str:
        if len(self.texts) > 1:
            self.texts = ["".join(self.texts)]
        return self.texts[0] if self.texts else ""


async def collect(generation: Generation) -> list[Answer]:
    """Read a generation to its end: one answer for each of its requests. Raises ApiError."""
    answers = [Answer() for _ in generation.members]
    while not generation.finished:
        for index, output in await generation.next():
            answers[index].add(output)
    return answers


def logprobs_size(answers: Sequence[Answer]) -> int:
    """Estimate the work of writing log probabilities with tokens as text, as a number of characters for `off_loop`."""
    items = (item for answer in answers for item in (*answer.prompt_logprobs, *answer.logprobs))
    return TOKEN_SIZE * sum(1 + len(item.top) + len(item.id_logprobs) for item in items)


class PromptTokensDetails(Struct, omit_defaults=True):
    """How much of the prompt came from the cache. `matched_tokens` and `lost` are extensions of OpenAI's format."""

    cached_tokens: int  # prompt tokens that were not computed, because a cached state had consumed them
    matched_tokens: int  # prompt tokens that the cache knew, with or without a state at their end
    lost: str = ""  # why cached_tokens is smaller than it could be: miss reasons, comma-separated; empty if it is not


class CompletionTokensDetails(Struct):
    """Counts of an answer's tokens by kind. Drafts from the text itself count as predicted too."""

    reasoning_tokens: int
    accepted_prediction_tokens: int  # drafts that were right
    rejected_prediction_tokens: int  # drafts that were wrong


class Usage(Struct):
    """Token counts of an answer, in OpenAI's form."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


def usage(
    generation: Generation, choices: int = 1, scoring: bool = False, reasoning_tokens: int | None = None
) -> Usage:
    """Return the token counts so far. A prompt with several choices is counted once.

    choices: requests in the ring for each prompt.
    scoring: only prompts are scored. Each request still draws one token, which is not counted.
    reasoning_tokens: None if the endpoint does not separate reasoning from the answer.
    """
    firsts = generation.members[::choices]
    prompt = sum(member.prompt_tokens for member in firsts)
    completion = 0 if scoring else sum(member.completion_tokens for member in generation.members)
    cached = sum(member.cached_tokens for member in firsts)
    matched = sum(member.matched_tokens for member in firsts)
    details: CompletionTokensDetails | UnsetType = UNSET
    if reasoning_tokens is not None:
        drafts = (sum(each.accepted for each in generation.members), sum(each.rejected for each in generation.members))
        details = CompletionTokensDetails(reasoning_tokens, *drafts)
    prompt_details = PromptTokensDetails(cached, matched, why_lost(firsts))
    return Usage(prompt, completion, prompt + completion, prompt_details, details)


def why_lost(members: Sequence[Member]) -> str:
    """Return why fewer tokens of these prompts were cached than could be: distinct miss reasons, comma-separated."""
    return ",".join(sorted({member.miss_reason for member in members if member.miss_reason}))


def summary(generation: Generation) -> dict[str, Any]:
    """Return the generation's fields of the canonical log line. Times are milliseconds since submission."""
    members = generation.members
    start = generation.created_at
    admitted = [m.admitted_at for m in members if m.admitted_at is not None]
    first = [m.first_token_at for m in members if m.first_token_at is not None]
    reasons = Counter(m.finish_reason or "unfinished" for m in members)
    return {
        "prompt_tokens": sum(m.prompt_tokens for m in members),
        "completion_tokens": sum(m.completion_tokens for m in members),
        "drafts_accepted": sum(m.accepted for m in members),
        "drafts_rejected": sum(m.rejected for m in members),
        "cached_tokens": sum(m.cached_tokens for m in members),
        "matched_tokens": sum(m.matched_tokens for m in members),
        "lost": why_lost(members),
        "queue_ms": milliseconds(min(admitted) - start) if admitted else None,
        "first_token_ms": milliseconds(min(first) - start) if first else None,
        "generation_ms": milliseconds(generation.age),
        "finish_reason": ",".join(sorted(reasons)),
        "sequences": len(members),
    }


def milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 2)


def token_text(text: Text, id: int) -> str:
    """Decode one token by itself. A token that is only a part of a character becomes U+FFFD."""
    found = text.token_bytes(id)
    return text.decode([id], skip_special_tokens=False) if found is None else found.decode(errors="replace")


def token_bytes(text: Text, id: int) -> list[int] | None:
    """Return the bytes of a token; None if they are a part of a character, and the tokenizer does not know them."""
    found = text.token_bytes(id)
    if found is None:
        shown = token_text(text, id)
        return None if "\ufffd" in shown else list(shown.encode())
    return list(found)


def finite(logprob: float) -> float:
    """Replace -inf, which JSON cannot express, by LEAST_LOGPROB."""
    return max(logprob, LEAST_LOGPROB)


def drop_output(answers: Sequence[Answer]) -> None:
    """Remove from each answer its only token, which was drawn because scoring a prompt needs a step."""
    for answer in answers:
        answer.texts, answer.ids, answer.logprobs = [], [], []
        answer.finish_reason, answer.stop_reason = "length", None
