"""The result-processor: token histories, text and stop conditions. Decides when a request is finished."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec.structs import replace

from baton.actors.actor import Send
from baton.actors.grants import RowMask
from baton.actors.lease import Lease
from baton.actors.messages import (
    Admitted,
    Delta,
    Donate,
    Drain,
    Ended,
    Free,
    Masked,
    Message,
    Over,
    Requeue,
    Retired,
    SaveFromReq,
    Settled,
    Stepped,
)
from baton.actors.requests import FinishReason, Hit, Output, Request, RetireReason, RowLogprobs, TokenLogprob
from baton.actors.results.constraint import Constraint
from baton.actors.tokens import count, pack, unpack
from baton.models.text.detokenizer import Detokenizer
from baton.models.text.grammars.matcher import GrammarError, GrammarMatcher, no_matcher
from baton.models.text.stop_strings import StopStrings

PROMPT_TAIL = 16
FINISH_REASONS: dict[RetireReason, FinishReason] = {
    "finished": "stop",
    "limit": "length",
    "capacity": "length",
    "aborted": "abort",
    "timeout": "abort",
    "failed": "error",
}


ABORT_REASONS = ("aborted", "timeout")


class Vocabulary(Protocol):
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


@dataclass(eq=False, slots=True)
class RequestHistory:
    """A request from its first admission to its last; it outlives a retraction.

    `history` is every token given or sampled; history[:donated] is what the cache knows of it under this grant.
    chars_to_skip: of its text still to come, those that the client has. failed_at: where its grant failed, and `error`
    why; suspect_until: where it failed before, and is run by itself. start: where its grant went on from; moved: with
    the tree's own state, where others have a copy. constraint: of a request that has a grammar.
    """

    request: Request
    history: list[int]
    detokenizer: Detokenizer
    stop_strings: StopStrings
    hit: Hit
    chars_to_skip: int
    failed_at: int = 0
    suspect_until: int = 0
    error: str = ""
    grant: int = 0
    start: int = 0
    moved: bool = False
    donated: int = 0
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    new_tokens: list[int] = field(default_factory=list)
    new_logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs_next: int = 0
    constraint: Constraint | None = None

    @property
    def completion_tokens(self) -> int:
        return len(self.history) - self.request.prompt_len


@dataclass
class ResultProcessor:
    """The result-processor actor. matcher: a new one for the grammar of a request, at its beginning; GrammarError."""

    send: Send
    vocabulary: Vocabulary
    matcher: Callable[[str], GrammarMatcher] = no_matcher
    counters: Counter[str] = field(default_factory=Counter)
    records: dict[str, RequestHistory] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._grants: dict[int, RequestHistory] = {}
        self._outputs: list[Output] = []
        self._unmasked: dict[int, RequestHistory] = {}

    def receive(self, message: Message) -> None:
        match message:
            case Admitted():
                self._admitted(message)
            case Stepped():
                self._stepped(message)
            case Retired():
                self._retired(message)
            case Ended(request, reason):
                self._ended(self.records[request], "length" if reason == "too_large" else "abort", reason)
            case Drain():
                self.send("cache", message)
            case _:
                raise TypeError(f"results got {message!r}")

    def act(self) -> None:
        """Masks come here, behind Settled: rows without a grammar do not wait for them."""
        if self._unmasked:
            self._mask()
        if self._outputs:
            self.send("api", Delta(self._outputs))
            self._outputs = []

    def leases(self) -> Iterator[Lease]:
        return iter(())

    def _admitted(self, admitted: Admitted) -> None:
        request = admitted.request
        record = self.records.get(request.id)
        if record is None:
            record = self.records[request.id] = self._record(admitted)
            earlier = record.detokenizer.push(record.history[request.prompt_len :])
            self._output(record, record.stop_strings.push(earlier))
        record.grant, record.failed_at = admitted.grant, 0
        record.start = record.donated = admitted.hit.cached_tokens
        record.moved = admitted.hit.origin == "slot"
        self._grants[admitted.grant] = record
        if request.grammar:
            self._unmasked[admitted.grant] = record

    def _record(self, admitted: Admitted) -> RequestHistory:
        request = admitted.request
        history = unpack(request.tokens)
        decode = self._decoder(request.skip_special_tokens)
        tail = history[max(request.prompt_len - PROMPT_TAIL, 0) : request.prompt_len]
        stops = StopStrings(request.stops.strings, request.stops.keep_stop)
        first = request.prompt_logprobs_from or 0
        detokenizer = Detokenizer(decode, tail)
        # A request that comes back with output may have more cached than its prompt; clients count prompt tokens.
        cached, matched = admitted.hit.cached_tokens, admitted.hit.matched_tokens
        hit = replace(
            admitted.hit,
            cached_tokens=min(cached, request.prompt_len),
            matched_tokens=min(matched, request.prompt_len),
        )
        return RequestHistory(
            request, history, detokenizer, stops, hit, request.delivered_chars, prompt_logprobs_next=first
        )

    def _decoder(self, skip_special_tokens: bool) -> Callable[[Sequence[int]], str]:
        return lambda ids: self.vocabulary.decode(ids, skip_special_tokens)

    def _stepped(self, stepped: Stepped) -> None:
        """Token ids, limits and stop strings first, then Settled, and only then the text that nobody waits for."""
        tokens = unpack(stepped.tokens)
        sampled = [(self._grants[g], token) for g, token in zip(stepped.grants, tokens, strict=True)]
        live = [(record, token) for record, token in sampled if record.finish is None]
        texts = {}
        for record, token in live:
            record.history.append(token)
            record.new_tokens.append(token)
            if record.request.stops.strings:
                texts[record] = self._text(record, token)
            self._check(record, token)
            if record.constraint is not None and record.finish is None:
                self._unmasked[record.grant] = record
        finished = [record.grant for record, _ in live if record.finish is not None]
        failed = {failure.grant for failure in stepped.failed}
        self.send("scheduler", Settled(stepped.step, finished, sorted(failed)))
        for failure in stepped.failed:
            record = self._grants[failure.grant]
            record.failed_at = record.failed_at or failure.position
            record.error = stepped.error or record.error
        for logprobs in stepped.prompt_logprobs:
            self._prompt_logprobs(logprobs)
        for logprobs in stepped.logprobs:
            record = self._grants[logprobs.grant]
            if record.new_tokens:
                record.new_logprobs += logprobs.items
        for checkpoint in stepped.checkpoints:
            if checkpoint.grant in failed:
                self.send("cache", Free([checkpoint.lease]))
            else:
                self._donate(self._grants[checkpoint.grant], checkpoint.lease, checkpoint.position, closes=False)
        for record, token in live:
            self._output(record, texts[record] if record in texts else self._text(record, token))

    def _text(self, record: RequestHistory, token: int) -> str:
        """What the token adds to the text that may be shown; a token that stops adds nothing, unless it is kept."""
        if not self._stops_on(record, token):
            return record.stop_strings.push(record.detokenizer.push([token]))
        if not record.request.stops.keep_stop:
            return ""
        return record.stop_strings.flush() + record.detokenizer.push([token])

    def _stops_on(self, record: RequestHistory, token: int) -> bool:
        stops = record.request.stops
        return record.completion_tokens > stops.min_tokens and token in stops.token_ids

    def _check(self, record: RequestHistory, token: int) -> None:
        if self._stops_on(record, token):
            record.finish, record.stop_reason = "stop", token
        elif record.stop_strings.matched is not None:
            record.finish, record.stop_reason = "stop", record.stop_strings.matched
        elif record.constraint is not None and self._completes(record, record.constraint, token):
            pass
        elif record.completion_tokens >= record.request.stops.max_tokens:
            record.finish = "length"

    def _completes(self, record: RequestHistory, constraint: Constraint, token: int) -> bool:
        """Whether the grammar ends the output behind this token, or is at an end with it."""
        try:
            if constraint.consume(token):
                record.finish = "stop"
        except GrammarError as error:
            record.finish, record.stop_reason = "error", str(error)
        return record.finish is not None

    def _mask(self) -> None:
        """Say what rows may draw next that have a grammar; those with nothing to draw are finished."""
        masks, finished = [], []
        for grant, record in self._unmasked.items():
            words = self._words(record) if record.finish is None else b""
            if words:
                masks.append(RowMask(grant, len(record.history), words))
            elif words is None:
                finished.append(grant)
        self._unmasked.clear()
        if masks or finished:
            self.send("scheduler", Masked(masks, finished))

    def _words(self, record: RequestHistory) -> bytes | None:
        """None if the output has to end here, which is told to the client."""
        try:
            if record.constraint is None:
                record.constraint = self._constraint(record)
            words = record.constraint.words(record.completion_tokens)
        except GrammarError as error:
            self._finish(record, "error", str(error))
            return None
        if words is None:
            self._finish(record, "stop", None)
        return words

    def _constraint(self, record: RequestHistory) -> Constraint:
        request = record.request
        return Constraint(self.matcher(request.grammar), request.stops, record.history[request.prompt_len :])

    def _prompt_logprobs(self, logprobs: RowLogprobs) -> None:
        """A replay may bring some again."""
        record = self._grants[logprobs.grant]
        fresh = logprobs.items[max(record.prompt_logprobs_next - logprobs.start, 0) :]
        record.prompt_logprobs += fresh
        record.prompt_logprobs_next += len(fresh)

    def _output(self, record: RequestHistory, text: str) -> None:
        """Give the client what is new; `text` is what may be shown now."""
        if record.finish is not None and record.stop_strings.matched is None:
            text += record.stop_strings.push(record.detokenizer.flush()) + record.stop_strings.flush()
        new, record.chars_to_skip = text[record.chars_to_skip :], max(record.chars_to_skip - len(text), 0)
        request = record.request
        self._outputs.append(
            Output(
                request=request.id,
                text=new,
                tokens=pack(record.new_tokens),
                prompt_tokens=request.prompt_len,
                completion_tokens=record.completion_tokens,
                finish_reason=record.finish,
                stop_reason=record.stop_reason,
                logprobs=record.new_logprobs,
                prompt_logprobs=record.prompt_logprobs,
                hit=record.hit,
            )
        )
        record.new_tokens, record.new_logprobs, record.prompt_logprobs = [], [], []
        self.counters["generation_tokens"] += count(self._outputs[-1].tokens)

    def _donate(self, record: RequestHistory, state: Lease, position: int, closes: bool) -> None:
        tokens = pack(record.history[record.donated : position])
        record.donated = position
        self.send("cache", Donate(record.grant, state, position, tokens, closes))

    def _retired(self, retired: Retired) -> None:
        """Finished beats aborted beats retracted and failed; a sound state is kept if it is wanted and new."""
        record = self._grants.pop(retired.grant)
        self._unmasked.pop(retired.grant, None)
        reason: RetireReason = "failed" if record.failed_at and retired.reason not in ABORT_REASONS else retired.reason
        stuck = reason == "failed" and record.failed_at <= record.suspect_until
        goes_on = record.finish is None and reason in ("retracted", "failed") and not stuck
        if goes_on:
            self._requeue(record)
        else:
            self._answer(record, reason)
        self._give_back_state(record, retired, goes_on or record.request.keep != "never")

    def _give_back_state(self, record: RequestHistory, retired: Retired, is_wanted: bool) -> None:
        """is_wanted: the client has not said that nobody will go on from it."""
        session, state, position = record.request.session, retired.state, retired.position
        worth = position > record.start or record.moved  # else it is where it came from, and its copy may be under way
        if retired.poisoned or not worth or not is_wanted:
            self.send("cache", Free([state], closes_grant=retired.grant))
        elif session:
            tokens = pack(record.history[record.donated : position])
            self.send("cache", SaveFromReq(retired.grant, session, state, position, tokens))
        elif position > record.donated or (record.moved and position == record.start):
            self._donate(record, state, position, closes=True)
        else:
            self.send("cache", Free([state], closes_grant=retired.grant))

    def _requeue(self, record: RequestHistory) -> None:
        record.request = replace(record.request, tokens=pack(record.history))
        record.suspect_until = max(record.suspect_until, record.failed_at)
        self.send("scheduler", Requeue(record.request, record.suspect_until))

    def _answer(self, record: RequestHistory, reason: RetireReason) -> None:
        if record.finish is None:
            self._finish(record, FINISH_REASONS[reason], record.error if reason == "failed" else reason)
        self._forget(record)

    def _ended(self, record: RequestHistory, finish: FinishReason, reason: str) -> None:
        self._finish(record, finish, reason)
        self._forget(record)

    def _finish(self, record: RequestHistory, finish: FinishReason, reason: str | None) -> None:
        record.finish, record.stop_reason = finish, reason
        self._output(record, "")

    def _forget(self, record: RequestHistory) -> None:
        del self.records[record.request.id]
        self.send("scheduler", Over(record.request.id))
