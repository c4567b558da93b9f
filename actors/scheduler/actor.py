"""The scheduler actor: it owns the queue, the running rows and their spare checkpoint slots, and carries out plans."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from baton.actors.actor import Send
from baton.actors.kinds import Kind
from baton.actors.lease import Lease
from baton.actors.messages import (
    Abort,
    Acquire,
    Cancel,
    Closed,
    Continue,
    Drain,
    Ended,
    Extended,
    Filled,
    Granted,
    Mark,
    Masked,
    Message,
    Over,
    Pause,
    Paused,
    Refused,
    Requeue,
    Return,
    Settled,
    Spare,
    Speeds,
    Submit,
)
from baton.actors.requests import EndReason, Request, most_resumed
from baton.actors.scheduler.plan import checkpoint_positions, plan
from baton.actors.scheduler.queue import OpenRequest
from baton.actors.scheduler.rows import RunningRows
from baton.actors.scheduler.state import Limits, Plan, SchedulerState


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
        self.rows = RunningRows(self.send, self.state, self.counters, self.positions)
        self._records: dict[str, OpenRequest] = {}  # all open requests, by id
        self._arrivals = 0  # requests accepted
        self._grants = 0  # grant ids given out
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
                self.rows.spare(message)
            case Mark(grant, position):
                self.rows.mark(grant, position)
            case Extended():
                self.rows.extended(message)
            case Filled(grant):
                self.rows.filled(grant)
            case Closed(grant):
                self.state.closing.pop(grant, None)
                self.state.cancelled.pop(grant, None)
            case Settled(_, finished, failed, advanced, proposals, chance):
                self.rows.settle(advanced, proposals, chance)
                self.rows.end(finished, "finished")
                self.rows.end(failed, "failed")
            case Masked(masks, finished):
                self.rows.mask(masks)
                self.rows.end(finished, "finished")
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
            self.rows.retire(record.grant, record.ended_by)
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
        self.state.queue.remove(record)
        record.admitted = True
        self.rows.admit(record, granted)

    def _refused(self, refused: Refused) -> None:
        record = self.state.acquiring.pop(refused.grant, None)
        if record is None:
            self.state.cancelled.pop(refused.grant).overtaken = refused.overtaken
            return
        self.state.queue.remove(record)
        self._end(record, "too_large", refused.message)

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
            self.rows.retire(grant, reason)
        if commands.step is not None:
            self.rows.step(commands.step)
        # The step may just have retired a row, at its last position; a Want or Extend for it is not sent.
        for grant, checkpoints in commands.want:
            self.rows.want(grant, checkpoints)
        self.rows.extend(commands.extend)
        self.rows.find_steady()
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
                grant=record.grant,
                tokens=request.tokens,
                limit=most_resumed(request),
                salt=request.salt,
                predecessor=predecessor,
                session=request.session,
                priority=request.priority,
                checkpoints=request.checkpoints,
                keep=request.keep,
                overtaken=record.overtaken,
                hint=request.hint,
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

    def _expects_leases(self) -> bool:
        return bool(self.state.closing or self.state.cancelled or self.rows.wants)

    def _idle(self) -> bool:
        return not self._records and not self._expects_leases() and self.state.in_flight == 0
