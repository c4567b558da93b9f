"""The actor named api: submits HTTP requests to the ring, and hands their outputs to one reader each."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any, Literal, Protocol, Self, TypeVar

from msgspec.structs import replace

from baton.actors.actor import Send
from baton.actors.lease import Lease
from baton.actors.messages import (
    Abort,
    Continue,
    Delta,
    Drain,
    Drained,
    Ended,
    Flush,
    Flushed,
    Kept,
    Message,
    Name,
    Pause,
    Paused,
    Restarted,
    Submit,
    Suspend,
    Suspended,
    Unname,
)
from baton.actors.requests import Output, PauseMode, Request
from baton.actors.tokens import Tokens
from baton.api import errors
from baton.api.errors import ApiError
from baton.api.generation.outputs import AbandonReason, EarlierOutput, Generation, Member
from baton.api.generation.request_context import RequestContext

T = TypeVar("T")


class Observer(Protocol):
    """An interface for measuring when tokens arrive from the ring, however fast clients read. Times are in seconds."""

    def first_tokens(self, waited: float, count: int) -> None:
        """Note the first `count` tokens of a request, which arrived `waited` seconds after its submission."""

    def tokens(self, gap: float, count: int) -> None:
        """Note `count` further tokens; `gap` is the inter-token latency."""


class Unobserved:
    """An Observer that measures nothing."""

    def first_tokens(self, waited: float, count: int) -> None:
        pass

    def tokens(self, gap: float, count: int) -> None:
        pass


class SessionRegistry(Protocol):
    """The interface of the session store for the gateway."""

    def on_kept(self, message: Kept) -> None:
        """Note where a session's state is now."""

    def names(self) -> Iterable[Name]:
        """Return the name and tokens of every session, for a new ring, which does not know the sessions yet."""


class NoSessions:
    """The registry of a server without sessions."""

    def on_kept(self, message: Kept) -> None:
        pass

    def names(self) -> Iterable[Name]:
        return ()


class Gateway:
    """The actor named api. Its mailbox receives messages of the ring; HTTP handlers call its methods.

    Everything runs in one event loop. A request id stays in use until the ring's last message about that request:
    otherwise a late output of an aborted request could reach a new request with the same id. The gateway outlives the
    other actors: when they restart, it submits every open request again. A *member* is one request of a Generation.
    """

    def __init__(
        self, timeout: float, observer: Observer | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """timeout: seconds after which a request ends with 504."""
        self.clock = clock
        self.sessions: SessionRegistry = NoSessions()
        self.on_end: Callable[[Member], None] | None = None  # called when a member will get no further outputs
        self.hold_grammar: Callable[[str], object] = lambda grammar: None  # its handle keeps a grammar compiled
        self.draining = False
        self.paused: PauseMode | None = None  # the mode of the current pause; None: not paused
        self._timeout = timeout
        self._observer: Observer = observer or Unobserved()
        self._send: Send | None = None
        self._open: dict[str, Member] = {}  # members that still get outputs, by request id
        self._abandoned: set[str] = set()  # ids of aborted requests whose last message has not arrived yet
        self._tickets = count(1)  # numbers that match Name, Flush, Suspend and Pause with their replies
        self._naming: dict[int, asyncio.Future[None]] = {}
        self._flushes: dict[int, asyncio.Future[None]] = {}
        self._suspending: dict[int, asyncio.Future[Suspended]] = {}
        self._pausing: dict[int, asyncio.Future[None]] = {}
        self._drained: asyncio.Future[list[str]] | None = None
        self._lost: ApiError | None = None  # why the ring has failed for good; None while it works
        self._changed = asyncio.Event()  # set when a request id is released

    def bind(self, send: Send) -> Self:
        """Connect the gateway to the ring: messages leave through `send`. Return the gateway, as the relay expects."""
        self._send = send
        return self

    @property
    def open_requests(self) -> int:
        return len(self._open)

    def waiting_prompt_tokens(self) -> int:
        """Return the number of prompt tokens of requests without a first token, apart from those found in the cache."""
        waiting = (member for member in self._open.values() if member.first_token_at is None)
        return sum(member.prompt_tokens - member.cached_tokens for member in waiting)

    # The actor

    def receive(self, message: Message) -> None:
        match message:
            case Delta():
                for output in message.outputs:
                    self._output(output)
            case Ended():
                self._ended(message)
            case Flushed():
                answer(self._flushes, message.ticket, None)
            case Suspended():
                answer(self._suspending, message.ticket, message)
            case Paused():
                answer(self._pausing, message.ticket, None)
            case Kept():
                self.sessions.on_kept(message)
                answer(self._naming, message.ticket, None)
            case Drained():
                if self._drained is not None and not self._drained.done():
                    self._drained.set_result(message.leaks)
            case Restarted():
                self._resubmit()
            case _:
                raise TypeError(f"the api got a {type(message).__name__}")

    def act(self) -> None:
        """Do nothing: `receive` wakes readers as outputs arrive."""

    def leases(self) -> Iterable[Lease]:
        return ()

    # For handlers

    def submit(
        self, requests: Sequence[Request], call: RequestContext | None = None, earlier: Sequence[EarlierOutput] = ()
    ) -> Generation:
        """Submit the requests of one HTTP request to the ring. Raises ApiError 400 for a used id, 503 while draining.

        call: the HTTP request, whose trace and flow the requests get.
        earlier: of requests that another engine has begun, the output that the client has; the reader gets it first.
        """
        if self.draining:
            raise errors.draining()
        ids = [request.id for request in requests]
        if call is not None:
            flow = call.flow or ids[0]
            requests = [replace(request, flow=flow, trace=call.trace.trace_id) for request in requests]
        if len(set(ids)) < len(ids) or any(i in self._open or i in self._abandoned for i in ids):
            raise errors.bad_request("the request id is in use, or appears twice", "rid", "duplicate_request_id")
        generation = Generation(self, self._timeout, call)
        now = self.clock()
        for index, request in enumerate(requests):
            held = self.hold_grammar(request.grammar)
            member = Member(index, request, generation, now, prompt_tokens=request.prompt_len, grammar=held)
            if earlier:
                member.begin_after(earlier[index])
            generation.members.append(member)
            self._open[request.id] = member
        for member in generation.members:
            self._post("scheduler", member.again() if member.delivered else Submit(member.request))
        return generation

    def abandon(self, generation: Generation, reason: AbandonReason) -> None:
        """Abort the members that have not ended, and drop the outputs that the ring still sends for them."""
        for member in generation.members:
            id = member.request.id
            if self._open.get(id) is member:  # After this member's end another request may have its id.
                self._close(id)
                self._abandoned.add(id)
                self._post("scheduler", Abort(id, reason))

    def abort(self, id: str) -> None:
        """End a request early; its reader gets finish_reason "abort". Do nothing if the request is not open."""
        if id in self._open:
            self._abort([id])

    def abort_batch(self, rid: str) -> int:
        """Abort the request `rid` and the requests of the batch `rid`, whose ids are `rid_0`, `rid_1`, …

        Return how many of these requests were open.
        """
        own = [id for id in self._open if id == rid or (id.startswith(f"{rid}_") and id[len(rid) + 1 :].isdigit())]
        self._abort(own)
        return len(own)

    def abort_all(self) -> int:
        """Abort every open request. Return how many there were."""
        self._abort(self._open)
        return len(self._open)

    async def flush(self) -> None:
        """Drop the radix tree and all copies of states. Return when all are dropped, those on disk included."""
        await self._ask(self._flushes, "cache", Flush)

    async def pause(self, mode: PauseMode) -> None:
        """Stop stepping until `resume`. Return when no step is in flight and, with "retract", all leases are home."""
        if self._send is None:
            raise errors.loading()
        self.paused = mode
        await self._ask(self._pausing, "scheduler", lambda ticket: Pause(ticket, mode))

    def resume(self) -> None:
        """End the current pause, if there is one."""
        self._post("scheduler", Continue())
        self.paused = None

    def name(self, session: str, salt: str, tokens: Tokens) -> asyncio.Future[None] | None:
        """Ask the cache to put the session's name on the deepest state at or before the end of `tokens`.

        Return a future that is done when the registry has been notified of that state, or when the ring has restarted
        or failed. Return None without a working ring: `name_all` names all sessions as soon as there is one.
        """
        if self._send is None or self._lost is not None:
            return None
        ticket = next(self._tickets)
        self._naming[ticket] = asyncio.get_running_loop().create_future()
        self._post("cache", Name(session, salt, tokens, ticket))
        return self._naming[ticket]

    def unname(self, session: str) -> None:
        """Remove the name of a closed session."""
        if self._send is not None:
            self._post("cache", Unname(session))

    def name_all(self) -> None:
        """Send the names of all sessions to a new ring."""
        for name in self.sessions.names():
            self._post("cache", name)

    async def suspend(self, session: str) -> Suspended:
        """Move the session's state out of its slot. Return the ring's report of where the state is then."""
        return await self._ask(self._suspending, "cache", lambda ticket: Suspend(ticket, session))

    async def drain(self, timeout_s: float, grace_s: float = 10.0) -> list[str]:
        """Refuse new requests, wait `timeout_s` seconds for open ones, answer the rest 503; then drain the ring.

        Return descriptions of the leases that were not home at the end. Raises TimeoutError if the ring does not answer
        within `grace_s` seconds, and ApiError if the ring has failed for good.
        """
        self.draining = True
        try:
            async with asyncio.timeout(timeout_s):
                while self._open:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            self.fail_all(errors.draining())
        async with asyncio.timeout(grace_s):
            while self._open or self._abandoned:
                self._changed.clear()
                await self._changed.wait()
            if self._lost is not None:
                raise self._lost
            self._drained = asyncio.get_running_loop().create_future()
            self._post("scheduler", Drain())
            return await self._drained

    def lose_ring(self, error: ApiError) -> None:
        """Treat the ring as failed for good: answer all requests with `error`, and stop waiting for its messages."""
        self.draining, self._lost = True, error
        self.fail_all(error)
        self._abandoned.clear()
        self._changed.set()
        if self._drained is not None and not self._drained.done():
            self._drained.set_exception(error)

    def fail_all(self, error: ApiError) -> None:
        """Fail every open request and every pending flush, suspension and pause with `error`."""
        waiting: list[asyncio.Future[Any]] = [
            *self._flushes.values(), *self._suspending.values(), *self._pausing.values()
        ]  # fmt: skip
        for future in waiting:
            if not future.done():
                future.set_exception(error)
        self._end_naming()
        for generation in {id(m.generation): m.generation for m in self._open.values()}.values():
            generation.fail(error)

    # Internals

    def _post(self, to: Literal["scheduler", "cache"], message: Message) -> None:
        if self._send is None:
            raise errors.loading()
        self._send(to, message)

    async def _ask(
        self,
        waiting: dict[int, asyncio.Future[T]],
        to: Literal["scheduler", "cache"],
        command: Callable[[int], Message],
    ) -> T:
        """Send a command with a new ticket, and return its answer, which `receive` puts into `waiting`."""
        ticket = next(self._tickets)
        waiting[ticket] = asyncio.get_running_loop().create_future()
        try:
            self._post(to, command(ticket))
            return await waiting[ticket]
        finally:
            waiting.pop(ticket, None)

    def _abort(self, ids: Iterable[str]) -> None:
        for id in ids:
            self._open[id].aborted = True
            self._post("scheduler", Abort(id))

    def _resubmit(self) -> None:
        """Repeat all unanswered requests and commands to the restarted actors, or answer them here.

        Tree and pools are empty after a restart. Pending suspensions are therefore answered with "tokens": the state is
        lost, and the session will continue from its tokens. `name_all` reports the same to the registry.
        """
        self._abandoned.clear()
        self._changed.set()
        self._end_naming()
        for ticket in self._flushes:
            self._post("cache", Flush(ticket))
        for ticket in list(self._suspending):
            answer(self._suspending, ticket, Suspended(ticket, "tokens", 0))
        self.name_all()
        self._pause_again()
        for id, member in list(self._open.items()):
            if member.aborted:
                self._ended(Ended(id, "aborted", "the request was aborted"))
            else:
                self._post("scheduler", member.again())
        if self._drained is not None and not self._drained.done():
            self._post("scheduler", Drain())

    def _end_naming(self) -> None:
        """End the waits for the answers to all Names."""
        for ticket in list(self._naming):
            answer(self._naming, ticket, None)

    def _pause_again(self) -> None:
        """Pause the new scheduler too. If the pause has ended by now, release the callers still waiting in `pause`."""
        if self.paused is None:
            for ticket in list(self._pausing):
                answer(self._pausing, ticket, None)
            return
        for ticket in self._pausing or [0]:
            self._post("scheduler", Pause(ticket, self.paused))

    def _output(self, output: Output) -> None:
        member = self._open.get(output.request)
        if member is None:
            if output.finish_reason is not None:
                self._last_word(output.request)
            return
        now = self.clock()
        if member.admitted_at is None and not output.tokens and output.finish_reason is None:
            member.admitted_at = now  # The result-processor reports an admission as an output without tokens.
        if output.completion_tokens > member.completion_tokens:
            self._time_tokens(member, now, output.completion_tokens - member.completion_tokens)
        first = member.first = member.first or output
        member.prompt_tokens = output.prompt_tokens
        member.completion_tokens = output.completion_tokens
        member.accepted, member.rejected = output.accepted, output.rejected
        member.finish_reason = output.finish_reason
        member.delivered += output.tokens
        member.shown += len(output.text)
        if output.finish_reason is not None:
            self._last_word(output.request)
        member.put(replace(output, hit=first.hit))
        if output.finish_reason == "error":
            member.generation.fail(errors.internal(f"the model failed on this request: {output.stop_reason}"))
        elif output.finish_reason == "grammar":
            member.generation.fail(errors.dead_end(str(output.stop_reason)))
        member.generation.wake()

    def _time_tokens(self, member: Member, now: float, new: int) -> None:
        if member.last_token_at is None:
            member.first_token_at = now
            self._observer.first_tokens(now - member.submitted_at, new)
        else:
            self._observer.tokens((now - member.last_token_at) / new, new)
        member.last_token_at = now

    def _ended(self, ended: Ended) -> None:
        member = self._open.get(ended.request)
        self._last_word(ended.request)
        if member is None:
            return
        # A resubmitted request may no longer fit the pool together with its output. It then ends with "length".
        # A request without output never fit, and gets an error.
        grown = ended.reason == "too_large" and member.completion_tokens > 0
        if ended.reason == "aborted" or grown:
            member.finish_reason = "length" if grown else "abort"
            counts = (member.prompt_tokens, member.completion_tokens)
            member.put(Output(ended.request, "", b"", *counts, finish_reason="length" if grown else "abort"))
            member.generation.wake()
        else:
            member.generation.fail(refusal(ended, self._timeout))

    def _close(self, id: str) -> None:
        member = self._open.pop(id, None)
        if member is not None and self.on_end is not None:
            self.on_end(member)

    def _last_word(self, id: str) -> None:
        self._close(id)
        self._abandoned.discard(id)
        self._changed.set()


def answer(waiting: dict[int, asyncio.Future[T]], ticket: int, result: T) -> None:
    """Give the caller with this ticket its answer, if it still waits."""
    if (future := waiting.pop(ticket, None)) is not None and not future.done():
        future.set_result(result)


def refusal(ended: Ended, timeout: float) -> ApiError:
    """Return the HTTP error for a request that the ring ended before it ran."""
    match ended.reason:
        case "queue_full":
            return errors.queue_full(ended.message)
        case "too_large":
            return errors.bad_request(ended.message, "prompt", "context_length_exceeded")
        case "draining":
            return errors.unavailable(ended.message, "draining")
        case _:
            return errors.timed_out(timeout)
