"""The api's actor: HTTP requests go into the ring as Submit, and come back as outputs, one reader each."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal, Protocol, Self

from actors.actor import Send
from actors.lease import Lease
from actors.messages import (
    Abort,
    Delta,
    Drain,
    Drained,
    Ended,
    Flush,
    Flushed,
    Message,
    Output,
    Request,
    Submit,
)
from api import errors
from api.errors import ApiError

MERGE_ABOVE = 64


class Observer(Protocol):
    """Told when tokens arrive, whatever the client's reading speed. Times in seconds."""

    def first_tokens(self, waited: float, count: int) -> None: ...

    def tokens(self, gap: float, count: int) -> None: ...


class Unobserved:
    def first_tokens(self, waited: float, count: int) -> None:
        pass

    def tokens(self, gap: float, count: int) -> None:
        pass


@dataclass
class Member:
    """One request of the ring and what has come back for it. Times are the gateway's clock, in seconds."""

    index: int
    request: Request
    generation: "Generation"
    submitted: float
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str | None = None
    pending: list[Output] = field(default_factory=list)

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
    last = outputs[-1]
    return Output(
        request=last.request,
        text="".join(o.text for o in outputs),
        tokens=b"".join(o.tokens for o in outputs),
        prompt_tokens=last.prompt_tokens,
        cached_tokens=last.cached_tokens,
        completion_tokens=last.completion_tokens,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        logprobs=[item for o in outputs for item in o.logprobs],
        prompt_logprobs=[item for o in outputs for item in o.prompt_logprobs],
    )


class Generation:
    """The ring's requests of one HTTP request (several for n > 1 or a batch), read together by one reader.

    A slow reader costs no more memory than the outputs themselves: what waits is merged. Leaving the `with` block
    aborts whatever is not finished.
    """

    def __init__(self, gateway: "Gateway", timeout: float) -> None:
        self.members: list[Member] = []
        self.created = gateway.clock()
        self.ended: float | None = None
        self._gateway = gateway
        self._wake = asyncio.Event()
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
    def age(self) -> float:
        """Seconds since submission; stops when the reader closes."""
        return (self.ended if self.ended is not None else self._gateway.clock()) - self.created

    async def next(self, wait: float | None = None) -> list[tuple[int, Output]]:
        """What has come since the last call, as (member, output); empty after `wait` seconds of silence.

        Raises ApiError if the request failed: then there is nothing more to come.
        """
        while True:
            self._wake.clear()
            if self._error is not None:
                raise self._error
            taken = [(m.index, output) for m in self.members if (output := m.take()) is not None]
            if taken or self.finished:
                return taken
            try:
                async with asyncio.timeout(wait):
                    await self._wake.wait()
            except TimeoutError:
                return []

    def wake(self) -> None:
        self._wake.set()

    def fail(self, error: ApiError, reason: Literal["aborted", "timeout"] = "aborted") -> None:
        """Abort what is left; the reader gets `error`."""
        if self._error is None and not self.finished:
            self._error = error
            self._gateway.abandon(self, reason)
            self.wake()

    def close(self) -> None:
        self._timer.cancel()
        self._gateway.abandon(self, "aborted")
        if self.ended is None:
            self.ended = self._gateway.clock()

    def _expire(self) -> None:
        self.fail(errors.timed_out(self._timeout), "timeout")


class Gateway:
    """The actor named api. Its mailbox brings Delta, Ended, Flushed and Drained; handlers call the other methods.

    Everything runs in one event loop. An id stays taken until the ring has given its last word on it, so that a late
    output of an aborted request can never reach another one.
    """

    def __init__(
        self, timeout: float, observer: Observer | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.clock = clock
        self.draining = False
        self._timeout = timeout
        self._observer: Observer = observer or Unobserved()
        self._send: Send | None = None
        self._open: dict[str, Member] = {}
        self._abandoned: set[str] = set()
        self._tickets = count(1)
        self._flushes: dict[int, asyncio.Future[None]] = {}
        self._drained: asyncio.Future[list[str]] | None = None
        self._quiet = asyncio.Event()

    def bind(self, send: Send) -> Self:
        """Connect to the ring: messages leave through `send`. Returns itself, as the relay wants its actor made."""
        self._send = send
        return self

    @property
    def open_requests(self) -> int:
        return len(self._open)

    # The actor

    def receive(self, message: Message) -> None:
        match message:
            case Delta():
                for output in message.outputs:
                    self._output(output)
            case Ended():
                self._ended(message)
            case Flushed():
                if (flush := self._flushes.pop(message.ticket, None)) is not None and not flush.done():
                    flush.set_result(None)
            case Drained():
                if self._drained is not None and not self._drained.done():
                    self._drained.set_result(message.astray)
            case _:
                raise TypeError(f"the api got a {type(message).__name__}")

    def act(self) -> None:
        """Nothing: readers are woken as outputs arrive."""

    def leases(self) -> Iterable[Lease]:
        return ()

    # For handlers

    def submit(self, requests: Sequence[Request]) -> Generation:
        """Send these into the ring. Raises 400 for an id in use, 503 while draining."""
        if self.draining:
            raise errors.unavailable("the server is shutting down", "draining")
        ids = [request.id for request in requests]
        taken = next((i for i in ids if i in self._open or i in self._abandoned), None)
        if taken is not None or len(set(ids)) < len(ids):
            raise errors.bad_request(f"the request id {taken or ids[0]!r} is in use", "rid", "duplicate_request_id")
        generation = Generation(self, self._timeout)
        now = self.clock()
        for index, request in enumerate(requests):
            member = Member(index, request, generation, now, prompt_tokens=request.prompt_len)
            generation.members.append(member)
            self._open[request.id] = member
        for request in requests:
            self._post("scheduler", Submit(request))
        return generation

    def abandon(self, generation: Generation, reason: Literal["aborted", "timeout"]) -> None:
        """Abort the members that have not ended; their late outputs are dropped."""
        for member in generation.members:
            if self._open.pop(member.request.id, None) is not None:
                self._abandoned.add(member.request.id)
                self._post("scheduler", Abort(member.request.id, reason))

    def abort(self, rid: str) -> int:
        """End the request `rid`, or the members of the batch `rid`, as if each had finished; returns how many."""
        own = [id for id in self._open if id == rid or (id.startswith(f"{rid}_") and id[len(rid) + 1 :].isdigit())]
        for id in own:
            self._post("scheduler", Abort(id))
        return len(own)

    def abort_all(self) -> int:
        for id in self._open:
            self._post("scheduler", Abort(id))
        return len(self._open)

    async def flush(self) -> None:
        """Forget the tree; returns when the cache has done it."""
        ticket = next(self._tickets)
        self._flushes[ticket] = asyncio.get_running_loop().create_future()
        try:
            self._post("cache", Flush(ticket))
            await self._flushes[ticket]
        finally:
            self._flushes.pop(ticket, None)

    async def drain(self, patience: float, grace: float = 10.0) -> list[str]:
        """Refuse new requests, give open ones `patience` seconds, tell the rest 503; then send Drain around the ring.

        Returns what was not home at the end. Raises TimeoutError if the ring does not answer within `grace` seconds.
        """
        self.draining = True
        try:
            async with asyncio.timeout(patience):
                while self._open:
                    self._quiet.clear()
                    await self._quiet.wait()
        except TimeoutError:
            self.fail_all(errors.unavailable("the server is shutting down", "draining"))
        async with asyncio.timeout(grace):
            while self._open or self._abandoned:
                self._quiet.clear()
                await self._quiet.wait()
            self._drained = asyncio.get_running_loop().create_future()
            self._post("scheduler", Drain())
            return await self._drained

    def fail_all(self, error: ApiError) -> None:
        """Answer every open request, and whoever waits for a flush, with `error`."""
        for flush in self._flushes.values():
            if not flush.done():
                flush.set_exception(error)
        for generation in {id(m.generation): m.generation for m in self._open.values()}.values():
            generation.fail(error)

    # Inside

    def _post(self, to: Literal["scheduler", "cache"], message: Message) -> None:
        if self._send is None:
            raise errors.unavailable("the model is loading", "loading")
        self._send(to, message)

    def _output(self, output: Output) -> None:
        member = self._open.get(output.request)
        if member is None:
            if output.finish_reason is not None:
                self._last_word(output.request)
            return
        now = self.clock()
        if member.admitted is None and not output.tokens and output.finish_reason is None:
            member.admitted = now  # An output without tokens says just that.
        if output.completion_tokens > member.completion_tokens:
            self._time_tokens(member, now, output.completion_tokens - member.completion_tokens)
        member.prompt_tokens = output.prompt_tokens
        member.cached_tokens = output.cached_tokens
        member.completion_tokens = output.completion_tokens
        member.finish_reason = output.finish_reason
        if output.finish_reason is not None:
            self._last_word(output.request)
        member.put(output)
        if output.finish_reason == "error":
            member.generation.fail(errors.internal("the model failed on this request"))
        member.generation.wake()

    def _time_tokens(self, member: Member, now: float, new: int) -> None:
        if member.last_token is None:
            member.first_token = now
            self._observer.first_tokens(now - member.submitted, new)
        else:
            self._observer.tokens((now - member.last_token) / new, new)
        member.last_token = now

    def _ended(self, ended: Ended) -> None:
        member = self._open.get(ended.request)
        self._last_word(ended.request)
        if member is None:
            return
        if ended.reason == "aborted":
            member.finish_reason = "abort"
            counts = (member.prompt_tokens, member.cached_tokens, member.completion_tokens)
            member.put(Output(ended.request, "", b"", *counts, finish_reason="abort"))
            member.generation.wake()
        else:
            member.generation.fail(refusal(ended, self._timeout))

    def _last_word(self, id: str) -> None:
        self._open.pop(id, None)
        self._abandoned.discard(id)
        self._quiet.set()


def refusal(ended: Ended, timeout: float) -> ApiError:
    """The HTTP error for a request that ended in the queue."""
    match ended.reason:
        case "queue_full":
            return errors.queue_full(ended.message)
        case "too_large":
            return errors.bad_request(ended.message, "prompt", "context_length_exceeded")
        case "draining":
            return errors.unavailable(ended.message, "draining")
        case _:
            return errors.timed_out(timeout)
