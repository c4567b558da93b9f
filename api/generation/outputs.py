"""The ring's outputs for one HTTP request, queued for the request's one reader.

One HTTP request becomes a Generation, and each of its sequences a Member: one request in the ring.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, Self, TypeAlias

from msgspec.structs import replace

from baton.actors.messages import Submit
from baton.actors.requests import MissReason, Origin, Output, Request, resubmission
from baton.actors.tokens import Tokens, count
from baton.api import errors
from baton.api.errors import ApiError
from baton.api.generation.request_context import RequestContext

MERGE_ABOVE = 64  # with more pending outputs than this, all are merged into one
AbandonReason: TypeAlias = Literal["aborted", "timeout"]


class GenerationGateway(Protocol):
    """The interface of the gateway for a generation."""

    clock: Callable[[], float]

    def abandon(self, generation: "Generation", reason: AbandonReason) -> None:
        """Abort the members that have not ended."""


class EarlierOutput(Protocol):
    """The output of a request that its client already has."""

    @property
    def tokens(self) -> Tokens: ...

    @property
    def text(self) -> str: ...


@dataclass
class Member:
    """One request in the ring and its outputs. Times are seconds on the gateway's clock, None before the event."""

    index: int  # the member's index in the generation
    request: Request
    generation: "Generation"
    submitted_at: float
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    accepted: int = 0  # drafts that were right
    rejected: int = 0  # drafts that were wrong
    finish_reason: str | None = None
    first: Output | None = None
    """The first output, which says what the cache had. It stays the first even after a retraction or a restart."""
    delivered: bytearray = field(default_factory=bytearray)  # all output tokens so far, packed, for a resubmission
    shown: int = 0  # characters of the text of all outputs so far
    aborted: bool = False
    grammar: object = None  # a handle that keeps the request's grammar compiled
    pending: list[Output] = field(default_factory=list)  # outputs that the reader has not taken yet

    @property
    def cached_tokens(self) -> int:
        return self.first.hit.cached_tokens if self.first is not None else 0

    @property
    def matched_tokens(self) -> int:
        return self.first.hit.matched_tokens if self.first is not None else 0

    @property
    def miss_reason(self) -> MissReason:
        return self.first.hit.miss_reason if self.first is not None else ""

    @property
    def origin(self) -> Origin:
        return self.first.hit.origin if self.first is not None else "tokens"

    def again(self) -> Submit:
        """Return the message that submits the request again, after the output that the reader has."""
        return Submit(resubmission(self.request, bytes(self.delivered), self.shown), resubmitted=True)

    def begin_after(self, earlier: EarlierOutput) -> None:
        """Continue an output that another engine has begun: the reader gets it first, as one output."""
        self.delivered, self.shown = bytearray(earlier.tokens), len(earlier.text)
        self.completion_tokens = count(earlier.tokens)
        self.put(Output(self.request.id, earlier.text, earlier.tokens, self.prompt_tokens, self.completion_tokens))

    def put(self, output: Output) -> None:
        """Queue an output for the reader."""
        self.pending.append(output)
        if len(self.pending) > MERGE_ABOVE:
            self.pending = [merge(self.pending)]

    def take(self) -> Output | None:
        """Return all pending outputs as one, or None if nothing is pending."""
        if not self.pending:
            return None
        output = self.pending[0] if len(self.pending) == 1 else merge(self.pending)
        self.pending = []
        return output


def merge(outputs: Sequence[Output]) -> Output:
    """Merge consecutive outputs of one request: join texts, tokens and log probabilities; keep the last counts."""
    return replace(
        outputs[-1],
        text="".join(o.text for o in outputs),
        tokens=b"".join(o.tokens for o in outputs),
        logprobs=[item for o in outputs for item in o.logprobs],
        prompt_logprobs=[item for o in outputs for item in o.prompt_logprobs],
        pooled=b"".join(o.pooled for o in outputs),
    )


class Generation:
    """The ring's requests of one HTTP request (several for n > 1 or a batch), read together by one reader.

    A slow reader costs no more memory than the outputs themselves, because pending outputs are merged. Leaving the
    `with` block aborts every member that has not finished.
    """

    def __init__(self, gateway: GenerationGateway, timeout: float, call: RequestContext | None = None) -> None:
        self.members: list[Member] = []
        self.call = call
        self.created_at = gateway.clock()
        self.ended_at: float | None = None
        self._gateway = gateway
        self._waiter: asyncio.Future[bool] | None = None
        self._error: ApiError | None = None
        self._timeout = timeout
        self._timer = asyncio.get_running_loop().call_later(timeout, self._expire)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def finished(self) -> bool:
        """Whether every member has ended and the reader has taken all outputs."""
        return all(m.finish_reason is not None and not m.pending for m in self.members)

    @property
    def error(self) -> ApiError | None:
        """The error that `next` raises to the reader instead of returning the last outputs; None without a failure."""
        return self._error

    @property
    def age(self) -> float:
        """Seconds from submission until now, or until the reader closed the generation."""
        return (self.ended_at if self.ended_at is not None else self._gateway.clock()) - self.created_at

    async def next(self, wait: float | None = None) -> list[tuple[int, Output]]:
        """Return the outputs since the last call, as (member index, output); none after `wait` seconds without outputs.

        Raises ApiError if the generation has failed; no outputs follow then.
        """
        while True:
            if self._error is not None:
                raise self._error
            outputs = [(m.index, output) for m in self.members if (output := m.take()) is not None]
            if outputs or self.finished:
                return outputs
            if not await self._woken(wait):
                return []

    async def _woken(self, wait: float | None) -> bool:
        """Wait at most `wait` seconds for `wake`; return whether it came. asyncio.timeout would add 10 µs a token."""
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = loop.call_later(wait, self._answer_waiter, False) if wait is not None else None
        try:
            return await self._waiter
        finally:
            if timer is not None:
                timer.cancel()

    def wake(self) -> None:
        """Wake the reader, because of new outputs, an end or an error."""
        self._answer_waiter(True)

    def _answer_waiter(self, woken: bool) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(woken)

    def fail(self, error: ApiError, reason: AbandonReason = "aborted") -> None:
        """Abort the members that have not ended, and make `next` raise `error` to the reader."""
        if self._error is None and not self.finished:
            self._error = error
            self._gateway.abandon(self, reason)
            self.wake()

    def close(self) -> None:
        """Stop the timeout, and abort the members that have not ended."""
        self._timer.cancel()
        self._gateway.abandon(self, "aborted")
        if self.ended_at is None:
            self.ended_at = self._gateway.clock()

    def _expire(self) -> None:
        self.fail(errors.timed_out(self._timeout), "timeout")
