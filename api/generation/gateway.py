"""The api's actor: HTTP requests go into the ring as Submit, and come back as outputs, one reader each."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any, Literal, Protocol, Self

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
from baton.actors.requests import Output, PauseMode, Request, resubmission
from baton.actors.tokens import Tokens
from baton.api import errors
from baton.api.errors import ApiError
from baton.api.generation.outputs import AbandonReason, Generation, Member
from baton.api.generation.request_context import RequestContext


class Observer(Protocol):
    """Told when tokens arrive, whatever the client's reading speed. Times in seconds."""

    def first_tokens(self, waited: float, count: int) -> None: ...

    def tokens(self, gap: float, count: int) -> None: ...


class Unobserved:
    def first_tokens(self, waited: float, count: int) -> None:
        pass

    def tokens(self, gap: float, count: int) -> None:
        pass


class SessionRegistry(Protocol):
    """The open sessions, as the gateway needs them.

    on_kept: told where a session's state is now. names: each session's name and tokens, for a ring that knows none.
    """

    def on_kept(self, message: Kept) -> None: ...

    def names(self) -> Iterable[Name]: ...


class NoSessions:
    def on_kept(self, message: Kept) -> None:
        pass

    def names(self) -> Iterable[Name]:
        return ()


class Gateway:
    """The actor named api. Its mailbox brings Delta, Ended, Flushed, Suspended, Kept, Paused, Drained and Restarted;
    handlers call the others.

    Everything runs in one event loop. An id stays taken until the ring has given its last word on it, so that a late
    output of an aborted request can never reach another one. It outlives the unit of the other actors: what was open
    when that was made anew is submitted again. on_end: told of each request when no more of it will reach a reader.
    hold_grammar: what keeps a request's grammar compiled while it is open.
    """

    def __init__(
        self, timeout: float, observer: Observer | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.clock = clock
        self.sessions: SessionRegistry = NoSessions()
        self.on_end: Callable[[Member], None] | None = None
        self.hold_grammar: Callable[[str], object] = lambda grammar: None
        self.draining = False
        self.paused: PauseMode | None = None
        self._timeout = timeout
        self._observer: Observer = observer or Unobserved()
        self._send: Send | None = None
        self._open: dict[str, Member] = {}
        self._abandoned: set[str] = set()
        self._tickets = count(1)
        self._flushes: dict[int, asyncio.Future[None]] = {}
        self._suspending: dict[int, asyncio.Future[Suspended]] = {}
        self._pausing: dict[int, asyncio.Future[None]] = {}
        self._drained: asyncio.Future[list[str]] | None = None
        self._lost: ApiError | None = None
        self._changed = asyncio.Event()

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
            case Suspended():
                if (asked := self._suspending.pop(message.ticket, None)) is not None and not asked.done():
                    asked.set_result(message)
            case Paused():
                if (pause := self._pausing.pop(message.ticket, None)) is not None and not pause.done():
                    pause.set_result(None)
            case Kept():
                self.sessions.on_kept(message)
            case Drained():
                if self._drained is not None and not self._drained.done():
                    self._drained.set_result(message.leaks)
            case Restarted():
                self._resubmit()
            case _:
                raise TypeError(f"the api got a {type(message).__name__}")

    def act(self) -> None:
        """Nothing: readers are woken as outputs arrive."""

    def leases(self) -> Iterable[Lease]:
        return ()

    # For handlers

    def submit(self, requests: Sequence[Request], call: RequestContext | None = None) -> Generation:
        """Send these into the ring, as part of the call's trace. Raises 400 for an id in use, 503 while draining."""
        if self.draining:
            raise errors.draining()
        ids = [request.id for request in requests]
        if call is not None:
            flow = call.flow or ids[0]
            requests = [replace(request, flow=flow, trace=call.trace.trace_id) for request in requests]
        if len(set(ids)) < len(ids) or any(i in self._open or i in self._abandoned for i in ids):
            raise errors.bad_request("the request id is in use, or given twice", "rid", "duplicate_request_id")
        generation = Generation(self, self._timeout, call)
        now = self.clock()
        for index, request in enumerate(requests):
            held = self.hold_grammar(request.grammar)
            member = Member(index, request, generation, now, prompt_tokens=request.prompt_len, grammar=held)
            generation.members.append(member)
            self._open[request.id] = member
        for request in requests:
            self._post("scheduler", Submit(request))
        return generation

    def abandon(self, generation: Generation, reason: AbandonReason) -> None:
        """Abort the members that have not ended; their late outputs are dropped."""
        for member in generation.members:
            id = member.request.id
            if self._open.get(id) is member:  # Once it has ended, another call may have the id.
                self._close(id)
                self._abandoned.add(id)
                self._post("scheduler", Abort(id, reason))

    def abort(self, id: str) -> None:
        """End this request, as if it had finished."""
        if id in self._open:
            self._abort([id])

    def abort_batch(self, rid: str) -> int:
        """End the request `rid`, and the members of the batch `rid`, as if each had finished; returns how many."""
        own = [id for id in self._open if id == rid or (id.startswith(f"{rid}_") and id[len(rid) + 1 :].isdigit())]
        self._abort(own)
        return len(own)

    def abort_all(self) -> int:
        self._abort(self._open)
        return len(self._open)

    async def flush(self) -> None:
        """Forget the tree and the copies below it; returns when that is done, on disk too."""
        ticket = next(self._tickets)
        self._flushes[ticket] = asyncio.get_running_loop().create_future()
        try:
            self._post("cache", Flush(ticket))
            await self._flushes[ticket]
        finally:
            self._flushes.pop(ticket, None)

    async def pause(self, mode: PauseMode) -> None:
        """Run nothing until `resume`; returns when no step is under way, and what `mode` gives back is given back."""
        ticket = next(self._tickets)
        self._pausing[ticket] = asyncio.get_running_loop().create_future()
        try:
            self._post("scheduler", Pause(ticket, mode))
            self.paused = mode
            await self._pausing[ticket]
        finally:
            self._pausing.pop(ticket, None)

    def resume(self) -> None:
        """Go on after `pause`; does nothing otherwise."""
        self._post("scheduler", Continue())
        self.paused = None

    def name(self, session: str, salt: str, tokens: Tokens) -> None:
        """Ask the cache to put the session's name on the deepest state at or below the end of `tokens`.

        Does nothing before there is a ring; `name_all` does it then.
        """
        if self._send is not None:
            self._post("cache", Name(session, salt, tokens))

    def unname(self, session: str) -> None:
        """The session is closed."""
        if self._send is not None:
            self._post("cache", Unname(session))

    def name_all(self) -> None:
        """The ring is new, and knows no session."""
        for name in self.sessions.names():
            self._post("cache", name)

    async def suspend(self, session: str) -> Suspended:
        """Let the session's state leave its slot; returns where it is when that is done."""
        ticket = next(self._tickets)
        self._suspending[ticket] = asyncio.get_running_loop().create_future()
        try:
            self._post("cache", Suspend(ticket, session))
            return await self._suspending[ticket]
        finally:
            self._suspending.pop(ticket, None)

    async def drain(self, timeout_s: float, grace_s: float = 10.0) -> list[str]:
        """Refuse new requests, give open ones `timeout_s` seconds, tell the rest 503; then send Drain around the ring.

        Returns what was not home at the end. Raises TimeoutError if the ring does not answer within `grace_s` seconds,
        ApiError if it is lost.
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
        """The ring is gone for good: answer everyone with `error`, and wait for nothing more from it."""
        self.draining, self._lost = True, error
        self.fail_all(error)
        self._abandoned.clear()
        self._changed.set()
        if self._drained is not None and not self._drained.done():
            self._drained.set_exception(error)

    def fail_all(self, error: ApiError) -> None:
        """Answer every open request, and whoever waits for a flush, a suspension or a pause, with `error`."""
        waiting: list[asyncio.Future[Any]] = [
            *self._flushes.values(), *self._suspending.values(), *self._pausing.values()
        ]  # fmt: skip
        for future in waiting:
            if not future.done():
                future.set_exception(error)
        for generation in {id(m.generation): m.generation for m in self._open.values()}.values():
            generation.fail(error)

    # Inside

    def _post(self, to: Literal["scheduler", "cache"], message: Message) -> None:
        if self._send is None:
            raise errors.loading()
        self._send(to, message)

    def _abort(self, ids: Iterable[str]) -> None:
        for id in ids:
            self._open[id].aborted = True
            self._post("scheduler", Abort(id))

    def _resubmit(self) -> None:
        """The unit was made anew, with an empty tree: whatever the old one owed is asked for again, or is done."""
        self._abandoned.clear()
        self._changed.set()
        for ticket in self._flushes:
            self._post("cache", Flush(ticket))
        for ticket, asked in self._suspending.items():
            if not asked.done():
                asked.set_result(Suspended(ticket, "tokens", 0))
        self.name_all()
        self._pause_again()
        for id, member in list(self._open.items()):
            if member.aborted:
                self._ended(Ended(id, "aborted", "the request was aborted"))
            else:
                again = resubmission(member.request, bytes(member.delivered), member.shown)
                self._post("scheduler", Submit(again, resubmitted=True))
        if self._drained is not None and not self._drained.done():
            self._post("scheduler", Drain())

    def _pause_again(self) -> None:
        """The new scheduler knows of no pause. Whoever waits for one that was continued meanwhile waits for nothing."""
        if self.paused is None:
            for pause in self._pausing.values():
                if not pause.done():
                    pause.set_result(None)
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
            member.admitted_at = now  # An output without tokens says just that.
        if output.completion_tokens > member.completion_tokens:
            self._time_tokens(member, now, output.completion_tokens - member.completion_tokens)
        first = member.first = member.first or output
        member.prompt_tokens = output.prompt_tokens
        member.completion_tokens = output.completion_tokens
        member.finish_reason = output.finish_reason
        member.delivered += output.tokens
        member.shown += len(output.text)
        if output.finish_reason is not None:
            self._last_word(output.request)
        member.put(replace(output, hit=first.hit))
        if output.finish_reason == "error":
            member.generation.fail(errors.internal(f"the model failed on this request: {output.stop_reason}"))
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
        # With output out already, a request that was submitted again and fits no more has reached the pool's limit.
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
