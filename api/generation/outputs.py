"""What has come back for one HTTP request, and its one reader."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, Self, TypeAlias

from msgspec.structs import replace

from baton.actors.requests import MissReason, Origin, Output, Request
from baton.api import errors
from baton.api.errors import ApiError
from baton.api.generation.request_context import RequestContext

MERGE_ABOVE = 64
AbandonReason: TypeAlias = Literal["aborted", "timeout"]


class GenerationGateway(Protocol):
    """The gateway, as a generation sees it."""

    clock: Callable[[], float]

    def abandon(self, generation: "Generation", reason: AbandonReason) -> None: ...


@dataclass
class Member:
    """One request in the ring, and what has come back for it. Times are seconds on the gateway's clock.

    A time is None until then. first: the first output, which says what came out of the cache; it stays, also after a
    retraction or a restart. delivered, shown: all output tokens so far, and how many characters of text came with them,
    for a resubmission. grammar: keeps the request's compiled. pending: outputs that the reader has not taken; beyond
    MERGE_ABOVE they become one.
    """

    index: int
    request: Request
    generation: "Generation"
    submitted_at: float
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str | None = None
    first: Output | None = None
    delivered: bytearray = field(default_factory=bytearray)
    shown: int = 0
    aborted: bool = False
    grammar: object = None
    pending: list[Output] = field(default_factory=list)

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

    def put(self, output: Output) -> None:
        self.pending.append(output)
        if len(self.pending) > MERGE_ABOVE:
            self.pending = [merge(self.pending)]

    def take(self) -> Output | None:
        if not self.pending:
            return None
        taken = self.pending[0] if len(self.pending) == 1 else merge(self.pending)
        self.pending = []
        return taken


def merge(outputs: Sequence[Output]) -> Output:
    """Consecutive outputs of one request as one: texts and tokens joined, counts of the last."""
    return replace(
        outputs[-1],
        text="".join(o.text for o in outputs),
        tokens=b"".join(o.tokens for o in outputs),
        logprobs=[item for o in outputs for item in o.logprobs],
        prompt_logprobs=[item for o in outputs for item in o.prompt_logprobs],
    )


class Generation:
    """The ring's requests of one HTTP request (several for n > 1 or a batch), read together by one reader.

    A slow reader costs no more memory than the outputs themselves: what waits is merged. Leaving the `with` block
    aborts whatever is not finished.
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
        """Every member has ended and the reader has taken everything."""
        return all(m.finish_reason is not None and not m.pending for m in self.members)

    @property
    def error(self) -> ApiError | None:
        """What its reader gets, or got, instead of an end."""
        return self._error

    @property
    def age(self) -> float:
        """Seconds since submission; stops when the reader closes."""
        return (self.ended_at if self.ended_at is not None else self._gateway.clock()) - self.created_at

    async def next(self, wait: float | None = None) -> list[tuple[int, Output]]:
        """What has come since the last call, as (member, output); empty after `wait` seconds of silence.

        Raises ApiError if the request failed: then there is nothing more to come.
        """
        while True:
            if self._error is not None:
                raise self._error
            taken = [(m.index, output) for m in self.members if (output := m.take()) is not None]
            if taken or self.finished:
                return taken
            if not await self._woken(wait):
                return []

    async def _woken(self, wait: float | None) -> bool:
        """Wait for `wake`; whether it came within so many seconds. asyncio.timeout would cost each token 10 µs more."""
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = loop.call_later(wait, self._answer_waiter, False) if wait is not None else None
        try:
            return await self._waiter
        finally:
            if timer is not None:
                timer.cancel()

    def wake(self) -> None:
        """Something has come: outputs, an end, an error."""
        self._answer_waiter(True)

    def _answer_waiter(self, woken: bool) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(woken)

    def fail(self, error: ApiError, reason: AbandonReason = "aborted") -> None:
        """Abort what is left; the reader gets `error`."""
        if self._error is None and not self.finished:
            self._error = error
            self._gateway.abandon(self, reason)
            self.wake()

    def close(self) -> None:
        self._timer.cancel()
        self._gateway.abandon(self, "aborted")
        if self.ended_at is None:
            self.ended_at = self._gateway.clock()

    def _expire(self) -> None:
        self.fail(errors.timed_out(self._timeout), "timeout")
