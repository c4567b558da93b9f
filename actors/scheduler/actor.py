"""The scheduler actor: it owns the queue, the running rows and their spare checkpoint slots, and carries out plans."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from baton.actors.actor import Send
from baton.actors.grants import Advance, GrantPages, Proposal, RowDrafts
from baton.actors.kinds import Kind
from baton.actors.lease import Lease
from baton.actors.messages import (
    Abort,
    Acquire,
    Admit,
    Cancel,
    Checkpoint,
    Closed,
    Continue,
    Drain,
    Ended,
    Extend,
    Extended,
    Filled,
    Free,
    Granted,
    Mark,
    Masked,
    Message,
    Over,
    Passed,
    Pause,
    Paused,
    Refused,
    Requeue,
    Retire,
    Return,
    Settled,
    Spare,
    Speeds,
    Step,
    Submit,
    Want,
)
from baton.actors.requests import EndReason, Request, RetireReason, most_resumed
from baton.actors.scheduler.plan import (
    checkpoint_positions,
    plan,
    steady_until,
    worth_saving,
)
from baton.actors.scheduler.queue import OpenRequest
from baton.actors.scheduler.state import Limits, Plan, ScheduledRow, SchedulerState, StepPlan
from baton.actors.scheduler.strategy import max_checkpoint_slots
from baton.actors.tokens import count, pack


@dataclass
class Scheduler:
    """The scheduler actor. It keeps the state from which `plan` decides, and carries out the plans."""

    send: Send
    limits: Limits
    positions: Callable[[Request, int | None], dict[int, Kind]] = checkpoint_positions
    """Returns the positions to checkpoint in a prompt, each with its kind. The int is Granted.branch."""
    counters: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.state = SchedulerState(self.limits)
        self._records: dict[str, OpenRequest] = {}  # all open requests, by id
        self._wants: set[int] = set()  # grants with a Want that is not answered
        self._keeps_checkpoints = max_checkpoint_slots(self.limits.strategy, self.limits.overlap, 1) > 0
        self._new_pages: dict[int, list[int]] = {}  # pages that the next Step hands to forward, by grant
        self._arrivals = 0  # requests accepted
        self._grants = 0  # grant ids given out
        self._served = 0  # how many times rows have advanced
        self._draining = self._drained = False
        self._same_id_waiting: dict[str, Request] = {}  # requests that wait until an older one with their id is over
        self._pauses: list[Pause] = []  # the pauses that are not answered yet

    def receive(self, message: Message) -> None:
        match message:
            case Submit():
                self._submit(message)
            case Abort(request, reason):
                self._abort(request, reason)
            case Granted():
                self._granted(message)
            case Refused():
                self._refused(message)
            case Spare():
                self._spare(message)
            case Mark(grant, position):
                self._mark(grant, position)
            case Extended(pages, starved):
                self._extended(pages, starved)
            case Filled(grant):
                if grant in self.state.rows:
                    self.state.rows[grant].filling = False
            case Closed(grant):
                self.state.closing.pop(grant, None)
                self.state.cancelled.pop(grant, None)
            case Settled(_, finished, failed, advanced, proposals, chance):
                self._settled(advanced, proposals, chance)
                for grant in finished:
                    self._retire(grant, "finished")
                for grant in failed:
                    self._retire(grant, "failed")
            case Masked(masks, finished):
                for mask in masks:
                    if mask.grant in self.state.rows:
                        self.state.rows[mask.grant].mask = mask
                for grant in finished:
                    self._retire(grant, "finished")
            case Requeue(request, suspect_until):
                self._requeue(request, suspect_until)
            case Over(request):
                del self._records[request]
                if request in self._same_id_waiting:
                    self._accept(self._same_id_waiting.pop(request))
            case Pause(_, mode):
                self.state.paused = "retract" if self.state.paused == "retract" else mode
                self._pauses.append(message)
            case Speeds():
                self.state.speeds = message
            case Continue():
                self.state.paused = None
                self._answer_pauses()  # answer now: another pause may begin before `act`
            case Drain():
                self._draining = True
            case _:
                raise TypeError(f"scheduler got {message!r}")

    def act(self) -> None:
        while self._carry_out(plan(self.state)):
            pass
        self._answer_pauses()
        if self._draining and not self._drained and self._idle():
            self._drained = True
            self.send("forward", Drain())

    def leases(self) -> Iterator[Lease]:
        for row in self.state.rows.values():
            yield from row.spares

    # Requests

    def _submit(self, submit: Submit) -> None:
        """Queue a new request, or refuse it.

        Its id may belong to an older request that is answered but not over. The new request then waits for that Over.
        """
        request = submit.request
        if self._draining:
            self.send("api", Ended(request.id, "draining", "the server is shutting down"))
        elif request.id in self._records:
            self._same_id_waiting[request.id] = request
        elif len(self.state.queue) >= self.limits.max_queue and not submit.resubmitted:
            self.send("api", Ended(request.id, "queue_full", f"{self.limits.max_queue} requests are waiting"))
        else:
            self._accept(request)

    def _accept(self, request: Request) -> None:
        self._arrivals += 1
        self._records[request.id] = OpenRequest(request, self._arrivals)
        self.state.queue.add(self._records[request.id])

    def _requeue(self, request: Request, suspect_until: int) -> None:
        record = self._records[request.id]
        record.request, record.admitted = request, False
        record.suspect_until = max(record.suspect_until, suspect_until)
        if record.ended_by is None:
            self.state.queue.add(record)
        else:
            self._end(record, "timeout" if record.ended_by == "timeout" else "aborted", "the request was aborted")

    def _abort(self, request: str, reason: EndReason) -> None:
        """End a request, whether it runs or waits. An unknown request has been answered already."""
        record = self._records.get(request)
        if self._same_id_waiting.pop(request, None) is not None:
            self.send("api", Ended(request, reason, "the request was aborted"))
            return
        if record is None or record.ended:
            return
        record.ended_by = "timeout" if reason == "timeout" else "aborted"
        if record.admitted and record.grant is not None:
            self._retire(record.grant, record.ended_by)
        elif not record.admitted:
            self._leave_queue(record)
            self._end(record, reason, "the request was aborted")

    def _leave_queue(self, record: OpenRequest) -> None:
        self.state.queue.remove(record)
        if record.grant is not None:
            self._cancel(record.grant)

    def _end(self, record: OpenRequest, reason: EndReason, message: str) -> None:
        """End a queued request: send Ended to results if the request has run and may have output, else to the api."""
        to_results = record.predecessor is not None
        self.send("results" if to_results else "api", Ended(record.request.id, reason, message))
        record.ended = True
        if not to_results:
            del self._records[record.request.id]

    def _answer_pauses(self) -> None:
        """Answer each Pause that is in effect, or all of them if the scheduler has been continued."""
        answered = [pause for pause in self._pauses if not self.state.paused or self._is_still(pause)]
        for pause in answered:
            self._pauses.remove(pause)
            self.send("api", Paused(pause.ticket))

    def _is_still(self, pause: Pause) -> bool:
        all_home = not (self.state.rows or self._expects_leases())
        return self.state.in_flight == 0 and (pause.mode == "in_place" or all_home)

    # The cache's answers

    def _granted(self, granted: Granted) -> None:
        record = self.state.acquiring.pop(granted.grant, None)
        if record is None:
            self.send("cache", Return(granted.grant, granted.state))  # cancelled while Granted was on its way
            return
        request = record.request
        self.state.queue.remove(record)
        record.admitted = True
        size = self.limits.page_size
        row = ScheduledRow(
            record=record,
            grant=granted.grant,
            position=granted.hit.cached_tokens,
            length=count(request.tokens),
            budget=request.stops.max_tokens - (count(request.tokens) - request.prompt_len),
            capacity=len(granted.pages) * size if size else None,
            targets=self._targets(request, granted),
            filling=granted.fill is not None,
            constrained=bool(request.grammar),
        )
        self.state.add(row)
        how_to_fill = granted.moved, granted.loan, granted.pages, granted.page_copy, granted.fill
        self.send("forward", Admit(granted.grant, request, granted.state, granted.hit, *how_to_fill))

    def _targets(self, request: Request, granted: Granted) -> dict[int, Kind]:
        """Return the positions to checkpoint that are far enough past the granted state to be worth a slot."""
        if not self._keeps_checkpoints:
            return {}
        positions = self.positions(request, granted.branch)
        return worth_saving(positions, granted.hit.cached_tokens, count(request.tokens), self.limits.min_saving)

    def _refused(self, refused: Refused) -> None:
        record = self.state.acquiring.pop(refused.grant, None)
        if record is None:
            self.state.cancelled.pop(refused.grant).overtaken = refused.overtaken
            return
        self.state.queue.remove(record)
        self._end(record, "too_large", refused.message)

    def _spare(self, spare: Spare) -> None:
        """Give a row its checkpoint slots. Denied positions are not saved. The slots of a retired row are freed."""
        self._wants.discard(spare.grant)
        row = self.state.rows.get(spare.grant)
        if row is None:
            if spare.leases:
                self.send("cache", Free(spare.leases))
            return
        row.awaits_spares = False
        row.spares += spare.leases
        for position in spare.denied:
            if row.targets.pop(position, None) is not None:
                self.counters["checkpoints_skipped"] += 1

    def _mark(self, grant: int, position: int) -> None:
        """Plan to save the row's state at this position for other requests; answer Passed if that is impossible."""
        row = self.state.rows.get(grant)
        # No answer is needed: the state is being saved, or the account closes soon, which ends the wait in the cache.
        if row is None or position in row.saved:
            return
        if row.position >= position or not self._keeps_checkpoints:
            self.send("cache", Passed(grant, position))
        else:
            row.targets[position] = min(row.targets.get(position, Kind.BRANCH), Kind.BRANCH)
            row.marks.add(position)
            row.refill = True

    def _extended(self, pages: list[GrantPages], starved: list[int]) -> None:
        for addition in pages:
            row = self.state.rows.get(addition.grant)
            if row is not None and row.capacity is not None:
                row.capacity += len(addition.pages) * self.limits.page_size
                row.extending = False
                self._new_pages.setdefault(addition.grant, []).extend(addition.pages)
        self.state.starved = {grant for grant in starved if grant in self.state.rows}

    # Carrying out a plan

    def _carry_out(self, commands: Plan) -> bool:
        """Carry out a plan. Return whether a step was sent and another one may follow at once."""
        for grant in commands.cancel:
            self.state.acquiring[grant].grant = None
            self._cancel(grant)
        for record in commands.acquire:
            self._acquire(record)
        for grant, reason in commands.retire:
            self.counters[f"rows_{reason}"] += 1
            self._retire(grant, reason)
        if commands.step is not None:
            self._step(commands.step)
        for grant, checkpoints in commands.want:
            self._want(grant, checkpoints)
        # The step may just have retired a row, at its last position.
        extend = [grant for grant in commands.extend if grant in self.state.rows]
        if extend:
            for grant in extend:
                self.state.rows[grant].extending = True
            self.send("cache", Extend(extend))
        for row in self.state.rows.values():
            if row.position >= row.steady_until:
                row.steady_until = steady_until(self.limits, row)
        return commands.step is not None and self.state.in_flight < self.limits.depth

    def _acquire(self, record: OpenRequest) -> None:
        self._grants += 1
        record.grant = self._grants
        self.state.acquiring[record.grant] = record
        request = record.request
        predecessor = record.predecessor if record.predecessor is not None else self._predecessor(request)
        self.send(
            "cache",
            Acquire(
                record.grant,
                request.tokens,
                most_resumed(request),
                request.salt,
                predecessor,
                request.session,
                request.priority,
                request.checkpoints,
                request.keep,
                record.overtaken,
                request.hint,
            ),
        )

    def _predecessor(self, request: Request) -> int | None:
        """Return a retired grant whose final state this request resumes from, if the state is not in the tree yet.

        A client that sends its next turn at once may be faster than the donation.
        """
        for grant, record in reversed(self.state.closing.items()):
            if record.request.salt == request.salt and request.tokens.startswith(record.request.tokens):
                return grant
        return None

    def _cancel(self, grant: int) -> None:
        """Cancel an Acquire. If the cache has granted it already, Granted is on its way and will be returned."""
        self.state.cancelled[grant] = self.state.acquiring.pop(grant)
        self.send("cache", Cancel(grant))

    def _retire(self, grant: int, reason: RetireReason) -> None:
        """Retire a row, unless it has been retired already: the first reason counts."""
        row = self.state.remove(grant)
        if row is None:
            return
        self.state.closing[grant] = row.record
        self.state.starved.discard(grant)
        self._new_pages.pop(grant, None)
        row.record.grant, row.record.predecessor = None, grant
        if row.spares:
            self.send("cache", Free(row.spares))
            row.spares = []
        self.send("forward", Retire(grant, reason, row.position))

    def _step(self, step: StepPlan) -> None:
        """Send a planned step, and advance its rows."""
        self.state.steps += 1
        self.state.in_flight += 1
        self.state.last_step_isolated = step.isolated
        for grant, position in step.missed:
            if position in self.state.rows[grant].marks:
                self.send("cache", Passed(grant, position))
        for grant, position in [*step.missed, *step.checkpoints]:
            del self.state.rows[grant].targets[position]
        self.counters["checkpoints_skipped"] += len(step.missed)
        checkpoints = [self._checkpoint(grant, position) for grant, position in step.checkpoints]
        pages = [GrantPages(grant, pages) for grant, pages in self._new_pages.items()]
        self._new_pages.clear()
        drafts = [RowDrafts(grant, pack(tokens)) for grant, tokens in step.drafts.items()]
        self.state.drafting = bool(drafts or step.predict)
        of_step = step.chunks, step.sit_out, checkpoints, pages, step.masks, drafts, step.propose, step.predict
        self.send("forward", Step(self.state.steps, *of_step))
        rows = self.state.rows
        for chunk in step.chunks:
            self._advance(rows[chunk.grant], chunk.tokens)
        for grant in step.decodes:
            self._advance(rows[grant], 1)

    def _settled(self, advanced: list[Advance], proposals: list[Proposal], chance: float) -> None:
        """Advance rows by their accepted drafts, and keep the proposals for the next step."""
        self.state.in_flight -= 1
        self.state.drafting = self.state.drafting and self.state.in_flight > 0
        rows = self.state.rows
        for advance in advanced:
            if advance.accepted and advance.grant in rows:
                self._advance(rows[advance.grant], advance.accepted)
        self.state.propose(proposals, chance)

    def _checkpoint(self, grant: int, position: int) -> Checkpoint:
        row = self.state.rows[grant]
        row.refill = True
        row.saved.add(position)
        return Checkpoint(grant, position, row.spares.pop())

    def _advance(self, row: ScheduledRow, tokens: int) -> None:
        self._served = row.served = self._served + 1
        row.position += tokens
        if row.position > row.steady_until:
            self._arrive(row, row.position - tokens)

    def _arrive(self, row: ScheduledRow, begin: int) -> None:
        """Handle a row's new position past its prompt. begin: the row's position before the step.

        The row's next output checkpoint becomes a target, and the row is retired when it has used its token budget.
        """
        if row.prefilling:
            return
        interval = self.limits.track_interval
        if not interval or not self._keeps_checkpoints or row.record.request.keep == "never":
            pass  # no checkpoints in the output
        elif begin < row.length or row.position // interval > begin // interval:
            boundary = (row.position // interval + 1) * interval
            if boundary <= row.last:
                row.targets[boundary] = Kind.CHECKPOINT
        if row.position == row.last:
            self._retire(row.grant, "limit")

    def _want(self, grant: int, checkpoints: list[tuple[int, Kind]]) -> None:
        row = self.state.rows.get(grant)
        if row is not None:
            row.awaits_spares, row.refill = True, False
            row.requested.update(position for position, _ in checkpoints)
            self._wants.add(grant)
            self.send("cache", Want(grant, checkpoints))

    def _expects_leases(self) -> bool:
        return bool(self.state.closing or self.state.cancelled or self._wants)

    def _idle(self) -> bool:
        return not self._records and not self._expects_leases() and self.state.in_flight == 0
