"""What came back for one request of the ring, put together; and what is said of it in usage and logs."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from baton.actors import tokens
from baton.actors.requests import Output, TokenLogprob
from baton.api.generation.outputs import Generation, Member
from baton.api.generation.served_model import Text

LEAST_LOGPROB = -9999.0
TOKEN_SIZE = 10  # characters whose encoding takes as long as decoding a token


@dataclass
class Answer:
    """All outputs of one member so far."""

    texts: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, output: Output) -> None:
        self.texts.append(output.text)
        self.ids += tokens.unpack(output.tokens)
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs
        self.finish_reason = output.finish_reason
        if output.finish_reason == "stop":
            self.stop_reason = output.stop_reason

    @property
    def text(self) -> str:
        if len(self.texts) > 1:
            self.texts = ["".join(self.texts)]
        return self.texts[0] if self.texts else ""


async def collect(generation: Generation) -> list[Answer]:
    """Read to the end. Raises ApiError."""
    answers = [Answer() for _ in generation.members]
    while not generation.finished:
        for index, output in await generation.next():
            answers[index].add(output)
    return answers


def logprobs_size(answers: Sequence[Answer]) -> int:
    """About the characters whose encoding takes as long as to tell all log probabilities, with the tokens as text."""
    told = (item for answer in answers for item in (*answer.prompt_logprobs, *answer.logprobs))
    return TOKEN_SIZE * sum(1 + len(item.top) + len(item.id_logprobs) for item in told)


class PromptTokensDetails(Struct, omit_defaults=True):
    """Of the prompt: tokens not computed again, and (beyond OpenAI's) tokens that the cache knew at all, and why states
    further on are lost, if some are.
    """

    cached_tokens: int
    matched_tokens: int
    lost: str = ""


class CompletionTokensDetails(Struct):
    reasoning_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


def usage(
    generation: Generation, choices: int = 1, scoring: bool = False, reasoning_tokens: int | None = None
) -> Usage:
    """Token counts up to here. A prompt with several choices counts once; scoring draws a token that does not.

    reasoning_tokens: None where reasoning is not told apart.
    """
    firsts = generation.members[::choices]
    prompt = sum(member.prompt_tokens for member in firsts)
    completion = 0 if scoring else sum(member.completion_tokens for member in generation.members)
    cached = sum(member.cached_tokens for member in firsts)
    matched = sum(member.matched_tokens for member in firsts)
    details = CompletionTokensDetails(reasoning_tokens) if reasoning_tokens is not None else UNSET
    prompt_details = PromptTokensDetails(cached, matched, why_lost(firsts))
    return Usage(prompt, completion, prompt + completion, prompt_details, details)


def why_lost(members: Sequence[Member]) -> str:
    """The reasons for which states that they would have gone on from are gone; empty if none is."""
    return ",".join(sorted({member.miss_reason for member in members if member.miss_reason}))


def summary(generation: Generation) -> dict[str, Any]:
    """The fields of the canonical log line. Times in milliseconds from the request's submission."""
    members = generation.members
    start = generation.created_at
    admitted = [m.admitted_at for m in members if m.admitted_at is not None]
    first = [m.first_token_at for m in members if m.first_token_at is not None]
    reasons = Counter(m.finish_reason or "unfinished" for m in members)
    return {
        "prompt_tokens": sum(m.prompt_tokens for m in members),
        "completion_tokens": sum(m.completion_tokens for m in members),
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
    """One token alone: a part of a character shows as U+FFFD."""
    return text.decode([id], skip_special_tokens=False)


def finite(logprob: float) -> float:
    """JSON knows no infinity."""
    return max(logprob, LEAST_LOGPROB)


def drop_output(answers: Sequence[Answer]) -> None:
    """Forget the token that was drawn only to score the prompt."""
    for answer in answers:
        answer.texts, answer.ids, answer.logprobs = [], [], []
        answer.finish_reason, answer.stop_reason = "length", None
