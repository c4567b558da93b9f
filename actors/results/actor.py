"""The result-processor: it owns token histories, text and stop conditions, and decides when a request is finished."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from msgspec.structs import replace

from baton.actors.actor import Send
from baton.actors.grants import LIKELY, Advance, Proposal, RowMask
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
from baton.actors.results.interfaces import (
    Constrain,
    Draft,
    Drafter,
    OutputConstraint,
    TextStream,
    Vocabulary,
    no_drafts,
    refuse_grammars,
)
from baton.actors.tokens import count, cut, pack, unpack
from baton.models.text.grammars.errors import ForbiddenToken, GrammarError
from baton.models.text.stop_strings import StopStrings

# The detokenizer gets this many of the prompt's last tokens: a token's text may depend on the tokens before it.
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


def finish_reason(error: GrammarError) -> FinishReason:
    """Return how an output ends whose constraint raised `error`."""
    return "error" if isinstance(error, ForbiddenToken) else "grammar"


@dataclass(eq=False, slots=True)
class RequestHistory:
    """The record of a request, from its first admission until its final answer. It outlives retractions and replays."""

    request: Request
    history: list[int]  # all tokens: the prompt and the output so far
    detokenizer: TextStream
    stop_strings: StopStrings
    hit: Hit  # the cache hit of the first admission, limited to the prompt
    chars_to_skip: int  # characters of the text to come that the client already received before a restart
    grant: int = 0  # the grant of the newest admission
    donated: int = 0  # history[:donated] is what the cache knows of this grant
    start: int = 0  # the position that this grant started from
    moved: bool = False  # this grant started with a state that was moved out of the tree, not with a copy
    failed_at: int = 0  # the position of the step in which this grant failed; 0: it has not
    suspect_until: int = 0  # up to this position the request runs in steps of its own, because it failed there
    error: str = ""  # why the grant failed
    finish: FinishReason | None = None  # None: not finished
    stop_reason: str | int | None = None  # as in Output
    new_tokens: list[int] = field(default_factory=list)  # not sent to the api yet
    new_logprobs: list[TokenLogprob] = field(default_factory=list)  # not sent to the api yet
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # not sent to the api yet
    pooled: bytes = b""  # as in Output, not sent to the api yet
    prompt_logprobs_next: int = 0  # index of the first prompt token that has not been reported
    constraint: OutputConstraint | None = None  # made for the first mask; None before that, and without a grammar
    drafter: Drafter | None = None  # None: no drafts
    accepted: int = 0  # as in Output
    rejected: int = 0  # as in Output

    @property
    def completion_tokens(self) -> int:
        return len(self.history) - self.request.prompt_len


@dataclass
class ResultProcessor:
    """The result-processor actor."""

    send: Send
    vocabulary: Vocabulary
    constrain: Constrain = refuse_grammars  # makes the constraint of a request with a grammar
    draft: Draft = no_drafts  # makes the drafter of a request
    counters: Counter[str] = field(default_factory=Counter)
    records: dict[str, RequestHistory] = field(default_factory=dict)  # by request id

    def __post_init__(self) -> None:
        self._grants: dict[int, RequestHistory] = {}
        self._outputs: list[Output] = []  # outputs for the next Delta
        self._unmasked: dict[int, RequestHistory] = {}  # rows that need their next mask, by grant
        self._propose = 0  # most tokens to propose for each row, as of the newest Stepped
        self._predicting: Drafter | None = None  # the drafter that got the newest predictions of the model's head

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
        """Send masks and outputs.

        Masks are computed only now, after Settled has been sent, so that rows without a grammar do not wait for them.
        """
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
            # After a restart the request comes back with output, whose text the client may have received in part.
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
        tail = history[max(request.prompt_len - PROMPT_TAIL, 0) : request.prompt_len]
        stops = StopStrings(request.stops.strings, request.stops.keep_stop)
        first = request.prompt_logprobs_from or 0
        detokenizer = self.vocabulary.detokenizer(tail, request.skip_special_tokens)
        # A request that resumes with output may have more tokens cached than its prompt has. Clients are sent counts
        # of prompt tokens, so the hit is limited to the prompt.
        cached, matched = admitted.hit.cached_tokens, admitted.hit.matched_tokens
        hit = replace(
            admitted.hit,
            cached_tokens=min(cached, request.prompt_len),
            matched_tokens=min(matched, request.prompt_len),
        )
        return RequestHistory(
            request,
            history,
            detokenizer,
            stops,
            hit,
            request.delivered_chars,
            prompt_logprobs_next=first,
            drafter=self.draft(request, history),
        )

    def _stepped(self, stepped: Stepped) -> None:
        """Check stop conditions, send Settled, then do the rest: text, log probabilities, checkpoints.

        The scheduler waits for Settled before it can send another step, so as little as possible comes before it.
        Text is needed early only for requests that have stop strings.
        """
        texts: dict[RequestHistory, str] = {}  # by request with new tokens: the text to show, if it is known already
        for grant, token in zip(stepped.grants, unpack(stepped.tokens), strict=True):
            record = self._grants[grant]
            # A request that has stopped may have more tokens: of accepted drafts, or of a step that was in flight.
            if record.finish is None:
                texts[record] = texts.get(record, "") + self._add(record, token)
        finished = [record.grant for record in texts if record.finish is not None]
        failed = {failure.grant for failure in stepped.failed}
        advanced = [
            self._verified(self._grants[fed.grant], fed.tokens) for fed in stepped.drafted if fed.grant not in failed
        ]
        self._propose = stepped.propose
        for row in stepped.predicted:
            if (drafter := self._grants[row.grant].drafter) is not None:
                drafter.predicted(unpack(row.tokens))
                self._predicting = drafter
        proposals = self._proposals(texts) if stepped.propose else []
        chance = self._predicting.chance if self._predicting is not None else 0.0
        self.send("scheduler", Settled(stepped.step, finished, sorted(failed), advanced, proposals, chance))
        for failure in stepped.failed:
            record = self._grants[failure.grant]
            record.failed_at = record.failed_at or failure.position
            record.error = stepped.error or record.error
        for logprobs in stepped.prompt_logprobs:
            self._prompt_logprobs(logprobs)
        for row_pooled in stepped.pooled:
            self._grants[row_pooled.grant].pooled = row_pooled.values
        for logprobs in stepped.logprobs:
            record = self._grants[logprobs.grant]
            if logprobs.start < len(record.history):  # else the token was discarded
                record.new_logprobs += logprobs.items
        for checkpoint in stepped.checkpoints:
            if checkpoint.grant in failed:
                self.send("cache", Free([checkpoint.lease]))
            else:
                self._donate(self._grants[checkpoint.grant], checkpoint.lease, checkpoint.position, closes=False)
        for record, text in texts.items():
            self._output(record, text if record.request.stops.strings else self._text_of_step(record))

    def _add(self, record: RequestHistory, token: int) -> str:
        """Add a drawn token, and check stop conditions. Return its text if the request has stop strings, else ""."""
        record.history.append(token)
        record.new_tokens.append(token)
        text = self._text(record, token) if record.request.stops.strings else ""
        self._check(record, token)
        if record.drafter is not None:
            record.drafter.push(token)
        if record.constraint is not None and record.finish is None:
            self._unmasked[record.grant] = record
        return text

    def _verified(self, record: RequestHistory, drafts: int) -> Advance:
        """Count the drafts of a row in a step. All its new tokens but the last are accepted drafts."""
        accepted = max(len(record.new_tokens) - 1, 0)
        record.accepted, record.rejected = record.accepted + accepted, record.rejected + drafts - accepted
        name = record.drafter.name if record.drafter is not None else ""
        self.counters[f"drafts_accepted:{name}"] += accepted
        self.counters[f"drafts_rejected:{name}"] += drafts - accepted
        return Advance(record.grant, accepted)

    def _proposals(self, records: Iterable[RequestHistory]) -> list[Proposal]:
        """Return proposals for those requests that have any. Rows with a grammar get them with their masks."""
        drafting = [each for each in records if each.drafter is not None and each.finish is None]
        proposals = [self._proposal(record) for record in drafting if not record.request.grammar]
        return [proposal for proposal in proposals if proposal.tokens]

    def _proposal(self, record: RequestHistory) -> Proposal:
        tokens, chance = record.drafter.propose(self._propose) if record.drafter is not None else ([], 0.0)
        return Proposal(record.grant, len(record.history), pack(tokens), chance)

    def _text_of_step(self, record: RequestHistory) -> str:
        """Return the text that can be shown after the step's tokens, of which only the last can have stopped it."""
        *before, last = record.new_tokens
        text = record.stop_strings.push(record.detokenizer.push(before)) if before else ""
        return text + self._text(record, last)

    def _text(self, record: RequestHistory, token: int) -> str:
        """Return the text that can be shown after this token; "" for a stop token, unless the client keeps it."""
        if not self._stops_on(record, token):
            return record.stop_strings.push(record.detokenizer.push([token]))
        if not record.request.stops.keep_stop:
            return ""
        return record.stop_strings.flush() + record.detokenizer.push([token])

    def _stops_on(self, record: RequestHistory, token: int) -> bool:
        stops = record.request.stops
        return record.completion_tokens > stops.min_tokens and token in stops.token_ids

    def _check(self, record: RequestHistory, token: int) -> None:
        """Set `finish` if this token finishes the request."""
        if self._stops_on(record, token):
            record.finish, record.stop_reason = "stop", token
        elif record.stop_strings.matched is not None:
            record.finish, record.stop_reason = "stop", record.stop_strings.matched
        elif record.constraint is not None and self._completes(record, record.constraint, token):
            pass  # _completes has set `finish`
        elif record.completion_tokens >= record.request.stops.max_tokens:
            record.finish = "length"

    def _completes(self, record: RequestHistory, constraint: OutputConstraint, token: int) -> bool:
        """Advance the grammar by this token. Return whether that finishes the request."""
        try:
            if constraint.consume(token):
                record.finish = "stop"
        except GrammarError as error:
            record.finish, record.stop_reason = finish_reason(error), str(error)
        return record.finish is not None

    def _mask(self) -> None:
        """Send the next masks of rows with a grammar, and finish the rows for which there is none."""
        masks, finished = [], []
        for grant, record in self._unmasked.items():
            if record.finish is not None:  # It has finished meanwhile, and that was reported.
                continue
            words = self._words(record)
            if words is None:
                finished.append(grant)
            else:
                masks.append(self._with_ahead(record, RowMask(grant, len(record.history), words)))
        self._unmasked.clear()
        if masks or finished:
            self.send("scheduler", Masked(masks, finished))

    def _with_ahead(self, record: RequestHistory, mask: RowMask) -> RowMask:
        """Return the mask with a proposal that the grammar allows, and the masks after its tokens, if there is one."""
        if not self._propose or record.constraint is None:
            return mask
        proposal = self._proposal(record)
        if not proposal.tokens or proposal.chance < LIKELY:
            return mask
        ahead = record.constraint.ahead(unpack(proposal.tokens), record.completion_tokens)
        allowed = replace(proposal, tokens=cut(proposal.tokens, 0, len(ahead)))
        return RowMask(mask.grant, mask.position, mask.words, ahead, allowed) if ahead else mask

    def _words(self, record: RequestHistory) -> bytes | None:
        """Return the row's next mask; None if the output ends here: then the request is finished."""
        try:
            if record.constraint is None:
                output = record.history[record.request.prompt_len :]
                record.constraint = self.constrain(record.request, output)
            words = record.constraint.words(record.completion_tokens)
        except GrammarError as error:
            self._finish(record, finish_reason(error), str(error))
            return None
        if words is None:
            self._finish(record, "stop", None)
        return words

    def _prompt_logprobs(self, logprobs: RowLogprobs) -> None:
        """Add those prompt log probabilities that have not been reported: a replay repeats some."""
        record = self._grants[logprobs.grant]
        fresh = logprobs.items[max(record.prompt_logprobs_next - logprobs.start, 0) :]
        record.prompt_logprobs += fresh
        record.prompt_logprobs_next += len(fresh)

    def _output(self, record: RequestHistory, text: str) -> None:
        """Add a request's new tokens, text and log probabilities to the next Delta. text: what may be shown now."""
        # At the end, held back text is shown too, except after a stop string.
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
                accepted=record.accepted,
                rejected=record.rejected,
                pooled=record.pooled if record.new_tokens else b"",
            )
        )
        record.pooled = b"" if record.new_tokens else record.pooled
        record.new_tokens, record.new_logprobs, record.prompt_logprobs = [], [], []
        self.counters["generation_tokens"] += count(self._outputs[-1].tokens)

    def _donate(self, record: RequestHistory, state: Lease, position: int, closes: bool) -> None:
        tokens = pack(record.history[record.donated : position])
        record.donated = position
        self.send("cache", Donate(record.grant, state, position, tokens, closes))

    def _retired(self, retired: Retired) -> None:
        """Answer or requeue the request of a row that is gone, and donate or free its state.

        A finished request stays finished, for whatever reason the row was retired. Otherwise an aborted request is
        answered. A retracted or failed one is requeued, unless it failed again at a position where it had run alone.
        """
        record = self._grants.pop(retired.grant)
        self._unmasked.pop(retired.grant, None)
        reason: RetireReason = "failed" if record.failed_at and retired.reason not in ABORT_REASONS else retired.reason
        stuck = reason == "failed" and record.failed_at <= record.suspect_until
        continues = record.finish is None and reason in ("retracted", "failed") and not stuck
        if continues:
            self._requeue(record)
        else:
            self._answer(record, reason)
        self._give_back_state(record, retired, continues or record.request.keep != "never")

    def _give_back_state(self, record: RequestHistory, retired: Retired, is_wanted: bool) -> None:
        """Donate the state of a row that is gone, or free it. Both close the grant's account.

        is_wanted: False if the client has said that it will not continue from this state.
        """
        session, state, position = record.request.session, retired.state, retired.position
        # At the grant's start position the state duplicates a cached one, unless the cached one itself was moved.
        is_new = position > record.start or record.moved
        if retired.poisoned or not is_new or not is_wanted:
            self.send("cache", Free([state], closes_grant=retired.grant))
        elif session:
            tokens = pack(record.history[record.donated : position])
            self.send("cache", SaveFromReq(retired.grant, session, state, position, tokens))
        elif position > record.donated or (record.moved and position == record.start):
            self._donate(record, state, position, closes=True)
        else:
            self.send("cache", Free([state], closes_grant=retired.grant))

    def _requeue(self, record: RequestHistory) -> None:
        """Send the request back to the scheduler with its output so far."""
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
        """Finish a request without a new token."""
        record.finish, record.stop_reason = finish, reason
        self._output(record, "")

    def _forget(self, record: RequestHistory) -> None:
        del self.records[record.request.id]
        self.send("scheduler", Over(record.request.id))
