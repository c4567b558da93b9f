"""Planted bugs in how drafts are fed, accepted and put into states."""

from collections import Counter
from typing import Any

from msgspec.structs import replace as replaced

from baton.actors.forward import actor as forward_actor
from baton.actors.forward.actor import Forward, LaunchedStep, RunningRow
from baton.actors.forward.device import Work, WorkDraft
from baton.actors.grants import Advance, RowMask
from baton.actors.messages import Retire, Step, Stepped
from baton.actors.results.actor import RequestHistory, ResultProcessor
from baton.actors.scheduler import drafts as planning, plan
from baton.actors.scheduler.rows import RunningRows
from baton.actors.scheduler.state import ScheduledRow, SchedulerState
from tests.simulation.hash_device import HashDevice
from tests.simulation.planting import Patch


def ring_read_after_a_rejection(patch: Patch) -> None:
    """Planted bug: a state consumes all drafts of the last step, also the rejected ones."""
    original = Forward._advance

    def advance(self: Forward, row: RunningRow, drafts: list[int]) -> WorkDraft:
        feed = original(self, row, drafts)
        # The number of drafts in each row's last step, by grant.
        numbers: dict[int, int] = self.__dict__.setdefault("numbers", {})
        fed, numbers[row.grant] = numbers.get(row.grant, 0), len(drafts)
        return replaced(feed, replays=fed)

    patch(Forward, "_advance", advance)


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
    """Planted bug: drafts that the state has consumed are replayed again in the next step."""
    original = Forward._advance

    def advance(self: Forward, row: RunningRow, drafts: list[int]) -> WorkDraft:
        feed = original(self, row, drafts)
        # The number of drafts that each row replayed in its last step, by grant.
        consumed: dict[int, int] = self.__dict__.setdefault("consumed", {})
        again, consumed[row.grant] = consumed.get(row.grant, 0), 0 if drafts else feed.replays
        return replaced(feed, replays=feed.replays or again)

    patch(Forward, "_advance", advance)


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
    original, original_add = ResultProcessor._stepped, ResultProcessor._add
    left = Counter[int]()  # tokens of the step that have not been added, by grant
    ends: dict[int, tuple[Any, Any]] = {}  # how a request with further tokens in the step has finished, by grant

    def stepped(self: ResultProcessor, message: Stepped) -> None:
        left.clear()
        left.update(message.grants)
        ends.clear()
        original(self, message)

    def add(self: ResultProcessor, record: RequestHistory, token: int) -> str:
        text = original_add(self, record, token)
        left[record.grant] -= 1
        if record.finish is not None:
            ends.setdefault(record.grant, (record.finish, record.stop_reason))
        if record.grant in ends:
            record.finish, record.stop_reason = (None, None) if left[record.grant] else ends[record.grant]
        return text

    patch(ResultProcessor, "_stepped", stepped)
    patch(ResultProcessor, "_add", add)


def accepted_count_ignored(patch: Patch) -> None:
    """Planted bug: the scheduler does not advance rows by their accepted drafts."""
    original = RunningRows.settle

    def settle(self: RunningRows, advanced: list[Advance], proposals: list[object], chance: float) -> None:
        original(self, [], proposals, chance)

    patch(RunningRows, "settle", settle)


def step_before_drafts_are_settled(patch: Patch) -> None:
    """Planted bug: a row may be in a step while another step, in which it feeds drafts, is in flight."""
    patch(SchedulerState, "drafting", property(lambda self: False, lambda self, value: None))


def ring_of_the_row_before(patch: Patch) -> None:
    """Planted bug: a new row replays drafts of the row that had its index before."""
    original_retire, original_advance = Forward._retire, Forward._advance

    def retire(self: Forward, message: Retire) -> None:
        row = self.rows[message.grant]
        self.__dict__.setdefault("left", {})[row.index] = row.accepted
        original_retire(self, message)

    def advance(self: Forward, row: RunningRow, drafts: list[int]) -> WorkDraft:
        feed = original_advance(self, row, drafts)
        before = self.__dict__.get("left", {}).pop(row.index, 0)
        return replaced(feed, replays=feed.replays or before)

    patch(Forward, "_retire", retire)
    patch(Forward, "_advance", advance)


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
        original(self, replaced(work, drafts=[replaced(draft, replays=number) for draft, number in pairs]))

    patch(HashDevice, "run", run)
