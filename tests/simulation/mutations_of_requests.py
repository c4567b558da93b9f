"""Planted bugs in the life of requests: admission, retirement, failure, replay, restart, shutdown."""

from typing import Any

from msgspec.structs import replace as replaced

from baton.actors.cache.actor import Account, Cache
from baton.actors.cache.page_queue import PageQueue
from baton.actors.cache.radix import Match, RadixTree
from baton.actors.forward.actor import Forward
from baton.actors.grants import Failure
from baton.actors.kinds import Kind
from baton.actors.messages import Extended, Ran, Requeue, Retire, Retired, Spare, Submit
from baton.actors.requests import Request, RetireReason
from baton.actors.results.actor import RequestHistory, ResultProcessor
from baton.actors.scheduler import plan
from baton.actors.scheduler.actor import Scheduler
from baton.actors.scheduler.plan import ScheduledRow, SchedulerState, StepPlan
from baton.actors.scheduler.rows import RunningRows
from baton.actors.tokens import pack
from baton.models.text.stop_strings import StopStrings
from tests.simulation import client
from tests.simulation.planting import Patch


def retired_before_its_event(patch: Patch) -> None:
    """Planted bug: forward reports a retirement ahead of earlier steps, so `Retired` arrives before their `Stepped`."""

    def retire(self: Forward, message: Retire) -> None:
        row = self.rows.pop(message.grant)
        self._free_rows.append(row.index)
        self.send("results", Retired(message.grant, message.reason, row.state, row.position))

    patch(Forward, "_retire", retire)


def retracted_progress_freed(patch: Patch) -> None:
    """Planted bug: a retracted request's state is freed although it has consumed more tokens than any in the tree."""
    original = ResultProcessor._retired

    def retired(self: ResultProcessor, message: Retired) -> None:
        if message.reason == "retracted":
            self._grants[message.grant].donated = message.position
        original(self, message)

    patch(ResultProcessor, "_retired", retired)


def salts_ignored(patch: Patch) -> None:
    """Planted bug: salts are ignored, so a request matches the cached states of other tenants."""
    original = RadixTree.match

    def match(self: RadixTree, salt: str, tokens: bytes, limit: int) -> Match:
        return original(self, "", tokens, limit)

    patch(RadixTree, "match", match)


def grant_id_reused(patch: Patch) -> None:
    """Planted bug: a retracted request is admitted again under its old grant id."""
    original = Scheduler._acquire

    def acquire(self: Scheduler, record: Any) -> None:
        if record.predecessor is not None:
            self._grants = record.predecessor - 1
        original(self, record)

    patch(Scheduler, "_acquire", acquire)


def failed_state_donated(patch: Patch) -> None:
    """Planted bug: the state of a row whose step raised is donated like any other."""
    original = ResultProcessor._retired

    def retired(self: ResultProcessor, message: Retired) -> None:
        message.poisoned = False
        original(self, message)

    patch(ResultProcessor, "_retired", retired)


def step_after_a_failed_one_believed(patch: Patch) -> None:
    """Planted bug: only the step that raised counts as failed, although its rows were already in the next step."""
    original = Forward._ran

    def ran(self: Forward, message: Ran) -> None:
        poisoned = dict(self._poisoned)
        if not message.error:
            self._poisoned.clear()
        original(self, message)
        self._poisoned |= poisoned

    patch(Forward, "_ran", ran)


def replay_resampled(patch: Patch) -> None:
    """Planted bug: a request that is replayed draws different tokens than before."""

    def requeue(self: ResultProcessor, record: RequestHistory) -> None:
        sampling = replaced(record.request.sampling, temperature=1.0, seed=record.request.sampling.seed + 1)
        request = replaced(record.request, sampling=sampling, tokens=pack(record.history))
        record.request = request
        record.suspect_until = max(record.suspect_until, record.failed_at)
        self.send("scheduler", Requeue(request, record.suspect_until))

    patch(ResultProcessor, "_requeue", requeue)


def replay_forgets_its_output(patch: Patch) -> None:
    """Planted bug: a request that is replayed starts at its prompt, and its new output is appended to the old."""
    original = ResultProcessor._requeue

    def requeue(self: ResultProcessor, record: RequestHistory) -> None:
        history = record.history
        record.history = history[: record.request.prompt_len]
        original(self, record)
        record.history = history

    patch(ResultProcessor, "_requeue", requeue)


def restart_forgets_the_output(patch: Patch) -> None:
    """Planted bug: after a restart a request is submitted without the tokens that were already delivered."""
    patch(client, "resubmission", lambda request, delivered, shown: request)


def restart_repeats_the_text(patch: Patch) -> None:
    """Planted bug: after a restart the text that the client already has is delivered again."""
    original = client.resubmission

    def resubmission(request: Request, delivered: bytes, shown: int) -> Request:
        return original(request, delivered, 0)

    patch(client, "resubmission", resubmission)


def innocent_rows_fail(patch: Patch) -> None:
    """Planted bug: a row that failed in one step with a poisonous row gets an error instead of a replay alone."""
    original = ResultProcessor._retired

    def retired(self: ResultProcessor, message: Retired) -> None:
        record = self._grants[message.grant]
        record.suspect_until = max(record.suspect_until, record.failed_at)
        original(self, message)

    patch(ResultProcessor, "_retired", retired)


def suspect_row_not_alone(patch: Patch) -> None:
    """Planted bug: a row that failed is replayed in the same step as other rows."""
    original = plan.plan_step

    def plan_step(state: SchedulerState, retiring: set[int]) -> StepPlan | None:
        records = [row.record for row in state.rows.values()]
        suspicions = [record.suspect_until for record in records]
        for record in records:
            record.suspect_until = 0
        step = original(state, retiring)
        for record, until in zip(records, suspicions, strict=True):
            record.suspect_until = until
        return step

    patch(plan, "plan_step", plan_step)


def failed_row_not_listed(patch: Patch) -> None:
    """Planted bug: the report of a step that raised leaves out the first of its rows."""
    original = Forward._ran

    def ran(self: Forward, message: Ran) -> None:
        reports = self._reports
        original(self, message)
        for report in reports:
            failed: list[Failure] = getattr(report, "failed", [])
            if failed:
                del failed[0]

    patch(Forward, "_ran", ran)


def overrun_sample_delivered(patch: Patch) -> None:
    """Planted bug: the sample that a row draws after it has stopped is delivered as output."""
    original = ResultProcessor._stepped

    def stepped(self: ResultProcessor, message: Any) -> None:
        for grant in message.grants:
            record = self._grants[grant]
            if record.finish == "stop":
                record.finish = None
        original(self, message)

    patch(ResultProcessor, "_stepped", stepped)


def spares_kept_at_the_end(patch: Patch) -> None:
    """Planted bug: a row that retires does not return its spare checkpoint slots."""
    original = RunningRows.retire

    def retire(self: RunningRows, grant: int, reason: str) -> None:
        row = self.state.rows.get(grant)
        if row is not None:
            self._forgotten = [*getattr(self, "_forgotten", []), *row.spares]
            row.spares = []
        original(self, grant, reason)

    patch(RunningRows, "retire", retire)


def late_spares_kept(patch: Patch) -> None:
    """Planted bug: checkpoint slots that arrive for a row that is gone are not returned."""
    original = RunningRows.spare

    def spare(self: RunningRows, message: Any) -> None:
        if message.grant in self.state.rows:
            original(self, message)
        else:
            self.wants.discard(message.grant)
            self._forgotten = [*getattr(self, "_forgotten", []), *message.leases]

    patch(RunningRows, "spare", spare)


def denied_checkpoint_still_wanted(patch: Patch) -> None:
    """Planted bug: a row waits forever for a checkpoint position whose slot was denied."""
    original = RunningRows.spare

    def spare(self: RunningRows, message: Spare) -> None:
        original(self, message)
        row = self.state.rows.get(message.grant)
        if row is not None and message.denied:
            row.targets |= dict.fromkeys(message.denied, Kind.CHECKPOINT)
            row.awaits_spares = True

    patch(RunningRows, "spare", spare)


def retired_twice(patch: Patch) -> None:
    """Planted bug: a row whose request is aborted is retired twice."""
    original = Scheduler._abort

    def abort(self: Scheduler, request: str, reason: Any) -> None:
        record = self._records.get(request)
        grant = record.grant if record is not None and record.admitted else None
        original(self, request, reason)
        if grant is not None:
            self.send("forward", Retire(grant, "aborted", 0))

    patch(Scheduler, "_abort", abort)


def aborted_row_keeps_running(patch: Patch) -> None:
    """Planted bug: a row whose request is aborted or timed out runs to its end."""
    original = RunningRows.retire

    def retire(self: RunningRows, grant: int, reason: RetireReason) -> None:
        if reason not in ("aborted", "timeout"):
            original(self, grant, reason)

    patch(RunningRows, "retire", retire)


def pages_of_an_aborted_row_sent(patch: Patch) -> None:
    """Planted bug: new pages of a row that has retired are sent with the next step."""
    original = RunningRows.retire

    def retire(self: RunningRows, grant: int, reason: str) -> None:
        pages = dict(self._new_pages)
        original(self, grant, reason)
        self._new_pages.update(pages)

    patch(RunningRows, "retire", retire)


def lone_request_ends_early(patch: Patch) -> None:
    """Planted bug: a request that runs alone ends with `length` while its own path still holds duplicate pages."""
    patch(PageQueue, "_take_from_own_path", lambda self, account: None)


def pool_with_a_copy_in_flight_counts_as_full(patch: Patch) -> None:
    """Planted bug: a request that runs alone ends with `length` while the source of its page copy is still held."""
    original = PageQueue.give

    def give(self: PageQueue) -> None:
        send = self._send
        self._send = lambda to, sent: send(to, Extended(sent.pages, list(self._waiting)))
        original(self)
        self._send = send

    patch(PageQueue, "give", give)


def donated_twice(patch: Patch) -> None:
    """Planted bug: a final state is donated although the checkpoint donated before it has the same position."""
    original = ResultProcessor._give_back_state

    def give_back_state(self: ResultProcessor, record: RequestHistory, retired: Retired, is_wanted: bool) -> None:
        is_known = record.start < retired.position == record.donated
        if is_known and not retired.poisoned and not record.request.session:
            self._donate(record, retired.state, retired.position, closes=True)
        else:
            original(self, record, retired, is_wanted)

    patch(ResultProcessor, "_give_back_state", give_back_state)


def stop_string_not_held_back(patch: Patch) -> None:
    """Planted bug: text that may begin a stop string is delivered at once instead of being held back."""
    patch(StopStrings, "_undecided", lambda self, text: 0)


def max_tokens_reset_by_a_retraction(patch: Patch) -> None:
    """Planted bug: a request that comes back from the queue may draw max_tokens again, ignoring its output so far."""
    original = ResultProcessor._requeue

    def requeue(self: ResultProcessor, record: RequestHistory) -> None:
        original(self, record)
        more = record.request.stops.max_tokens + record.completion_tokens
        record.request = replaced(record.request, stops=replaced(record.request.stops, max_tokens=more))

    patch(ResultProcessor, "_requeue", requeue)


def row_without_a_page_forgotten(patch: Patch) -> None:
    """Planted bug: a row that waits for a page is forgotten as soon as another request's account closes."""
    original = Cache._close

    def close(self: Cache, account: Account) -> None:
        original(self, account)
        self.page_queue._waiting.clear()

    patch(Cache, "_close", close)


def id_reused_while_its_row_retires(patch: Patch) -> None:
    """Planted bug: a new request replaces the record of an answered one with its id, whose row has yet to retire."""
    original = Scheduler._submit

    def submit(self: Scheduler, message: Submit) -> None:
        self._records.pop(message.request.id, None)
        original(self, message)

    patch(Scheduler, "_submit", submit)


def requests_accepted_after_the_drain(patch: Patch) -> None:
    """Planted bug: the scheduler accepts requests again once its `Drain` has been sent round the ring."""
    original = Scheduler.act

    def act(self: Scheduler) -> None:
        original(self)
        if self._drained:
            self._draining = self._drained = False

    patch(Scheduler, "act", act)


def resubmission_refused(patch: Patch) -> None:
    """Planted bug: a full queue refuses requests that were accepted before a restart."""
    original = Scheduler._submit

    def submit(self: Scheduler, message: Submit) -> None:
        original(self, Submit(message.request))

    patch(Scheduler, "_submit", submit)


def prompts_without_a_share(patch: Patch) -> None:
    """Planted bug: decoding rows may use all the tokens of a step, and none are reserved for prompts."""
    patch(plan, "prompt_share", lambda limits: 0)


def same_rows_decode_every_step(patch: Patch) -> None:
    """Planted bug: when more rows decode than fit into a step, the same first ones decode every time."""
    original = plan.fill_step

    def fill_step(state: SchedulerState, rows: list[ScheduledRow], isolated: bool) -> StepPlan:
        served = [row.served for row in rows]
        for row in rows:
            row.served = 0
        step = original(state, rows, isolated)
        for row, step_number in zip(rows, served, strict=True):
            row.served = step_number
        return step

    patch(plan, "fill_step", fill_step)
