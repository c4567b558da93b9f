"""Planted bugs in how drafts are fed, accepted and put into states."""

from baton.actors.forward import actor as forward_actor
from baton.actors.forward.actor import Forward, LaunchedStep, RunningRow
from baton.actors.forward.device import Work, WorkDraft
from baton.actors.grants import Advance, RowMask
from baton.actors.messages import Admit, Retire, Step, Stepped
from baton.actors.results.actor import RequestHistory, ResultProcessor
from baton.actors.scheduler import drafts as planning, plan
from baton.actors.scheduler.actor import Scheduler
from baton.actors.scheduler.state import ScheduledRow, SchedulerState
from tests.simulation.hash_device import HashDevice
from tests.simulation.planting import Patch


def ring_read_after_a_rejection(patch: Patch) -> None:
    """Planted bug: a state consumes all drafts of the last step, also the rejected ones."""
    original = Forward._stepped

    def stepped(self: Forward, running: LaunchedStep, ran: object) -> Stepped:
        message = original(self, running, ran)
        for grant, drafts in running.drafts.items():
            if grant in self.rows and grant in message.grants:
                self.rows[grant].accepted = len(drafts)
        return message

    patch(Forward, "_stepped", stepped)


def one_draft_too_many_accepted(patch: Patch) -> None:
    """Planted bug: the draw after the first wrong draft counts too."""

    def valid_draws(step: LaunchedStep, tokens: list[int], not_finite: list[int]) -> dict[int, list[int]]:
        valid = original(step, tokens, not_finite)
        begin = 0
        for grant in step.sampling:
            drawn = tokens[begin : begin + 1 + len(step.drafts.get(grant, []))]
            begin += len(drawn)
            valid[grant] = drawn[: len(valid[grant]) + 1]
        return valid

    original = forward_actor.valid_draws
    patch(forward_actor, "valid_draws", valid_draws)


def accepted_drafts_replayed_again(patch: Patch) -> None:
    """Planted bug: drafts that the state has consumed are put into it again in the next step."""
    original = Forward._step

    def step(self: Forward, message: Step) -> None:
        before = {grant: row.accepted for grant, row in self.rows.items()}
        original(self, message)
        for grant, row in self.rows.items():
            if before[grant] and not row.accepted and grant not in message.sit_out:
                row.accepted, row.position = before[grant], row.position - before[grant]

    patch(Forward, "_step", step)


def commit_of_drafts_after_the_stop(patch: Patch) -> None:
    """Planted bug: the state of a row that is retired consumes all accepted drafts, also those after a stop."""
    original = Forward._retire

    def retire(self: Forward, message: Retire) -> None:
        row = self.rows[message.grant]
        original(self, Retire(message.grant, message.reason, row.position + row.accepted))

    patch(Forward, "_retire", retire)


def commit_left_out(patch: Patch) -> None:
    """Planted bug: the state of a row that is retired is believed to have consumed the accepted drafts."""
    original = Forward._retire

    def retire(self: Forward, message: Retire) -> None:
        self.rows[message.grant].position = message.position
        original(self, message)

    patch(Forward, "_retire", retire)


def failed_commit_believed(patch: Patch) -> None:
    """Planted bug: an error of a commit is ignored, so that the state is donated."""
    original = Forward._ran

    def ran(self: Forward, message: object) -> None:
        original(self, replace_error(message) if message.step == 0 else message)

    def replace_error(message: object) -> object:
        return type(message)(message.step, b"", [], [])

    patch(Forward, "_ran", ran)


def slot_cleared_again_by_a_step_with_drafts(patch: Patch) -> None:
    """Planted bug: the deferred clearing of a slot is run again by the row's step with drafts."""
    original = Forward._step

    def step(self: Forward, message: Step) -> None:
        for fed in message.drafts:
            self.device.clear(self.rows[fed.grant].state.slot)
        original(self, message)

    patch(Forward, "_step", step)


def drafts_beyond_the_pages(patch: Patch) -> None:
    """Planted bug: the pages of a row need not cover its drafts."""
    original = planning.usable_drafts

    def usable_drafts(state: SchedulerState, row: ScheduledRow) -> object:
        capacity, row.capacity = row.capacity, None
        try:
            return original(state, row)
        finally:
            row.capacity = capacity

    patch(planning, "usable_drafts", usable_drafts)


def drafts_beyond_a_checkpoint(patch: Patch) -> None:
    """Planted bug: drafts may cross a checkpoint, which is taken in the step that draws them."""
    original = planning.usable_drafts

    def usable_drafts(state: SchedulerState, row: ScheduledRow) -> object:
        targets, row.targets = row.targets, {}
        try:
            return original(state, row)
        finally:
            row.targets = targets

    def plan_checkpoints(step: plan.StepPlan, moves: object) -> None:
        original_checkpoints(step, moves)
        for grant in step.decodes:
            row = step_rows.get(grant)
            if row is not None:
                held = {position for of, position in step.checkpoints if of == grant}
                ahead = [at for at in row.targets if row.position < at <= row.position + 3 and at not in held]
                step.checkpoints += [(grant, at) for at in ahead[: len(row.spares) - len(held)]]

    step_rows: dict[int, ScheduledRow] = {}
    original_plan, original_checkpoints = plan.plan_step, plan.plan_checkpoints

    def plan_step(state: SchedulerState, retiring: set[int]) -> object:
        step_rows.clear()
        step_rows.update({grant: row for grant, row in state.rows.items() if row.proposal is not None})
        return original_plan(state, retiring)

    patch(plan, "plan_step", plan_step)
    patch(plan, "plan_checkpoints", plan_checkpoints)
    patch(planning, "usable_drafts", usable_drafts)


def tokens_after_a_stop(patch: Patch) -> None:
    """Planted bug: accepted drafts after a token that stops the request belong to its output."""
    original = ResultProcessor._stepped

    def stepped(self: ResultProcessor, message: Stepped) -> None:
        stopped = {}
        for grant in set(message.grants):
            record = self._grants[grant]
            stopped[record] = record.finish

        def add(self: ResultProcessor, record: RequestHistory, token: int) -> str:
            text = original_add(self, record, token)
            if record.finish is not None:
                stopped[record], record.finish = record.finish, stopped[record]
            return text

        original_add = ResultProcessor._add
        ResultProcessor._add = add
        try:
            original(self, message)
        finally:
            ResultProcessor._add = original_add

    patch(ResultProcessor, "_stepped", stepped)


def accepted_count_ignored(patch: Patch) -> None:
    """Planted bug: the scheduler does not advance rows by their accepted drafts."""
    original = Scheduler._settled

    def settled(self: Scheduler, advanced: list[Advance], proposals: list[object]) -> None:
        original(self, [], proposals)

    patch(Scheduler, "_settled", settled)


def step_before_drafts_are_settled(patch: Patch) -> None:
    """Planted bug: a row may be in a step while another one with drafts of it is in flight."""
    patch(SchedulerState, "drafting", property(lambda self: False, lambda self, value: None))


def ring_of_the_row_before(patch: Patch) -> None:
    """Planted bug: a new row replays drafts of the row that had its index before."""
    left: dict[int, int] = {}
    original_retire, original_admit = Forward._retire, Forward._admit

    def retire(self: Forward, message: Retire) -> None:
        row = self.rows[message.grant]
        left[row.index] = row.accepted
        original_retire(self, message)

    def admit(self: Forward, message: Admit) -> None:
        original_admit(self, message)
        row: RunningRow = self.rows[message.grant]
        row.accepted = left.pop(row.index, 0)
        row.position -= row.accepted

    patch(Forward, "_retire", retire)
    patch(Forward, "_admit", admit)


def mask_of_another_draft(patch: Patch) -> None:
    """Planted bug: each draw after a draft has the mask of the position before it."""
    original = planning.mask_of

    def mask_of(row: ScheduledRow, drafts: int) -> RowMask | None:
        mask = original(row, drafts)
        return mask and RowMask(mask.grant, mask.position, mask.words, [mask.words, *mask.ahead][: len(mask.ahead)])

    patch(plan, "mask_of", mask_of)


def drafts_of_another_row(patch: Patch) -> None:
    """Planted bug: the rows of a step replay the numbers of drafts of each other."""
    original = HashDevice.run

    def run(self: HashDevice, work: Work) -> None:
        replays = [draft.replays for draft in reversed(work.drafts)]
        pairs = zip(work.drafts, replays, strict=True)
        drafts = [WorkDraft(draft.row, number, draft.tokens) for draft, number in pairs]
        fields = work.chunks, work.decodes, work.positions, work.checkpoints, work.masks, drafts, work.commits
        original(self, Work(work.step, *fields))

    patch(HashDevice, "run", run)
