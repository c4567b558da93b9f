"""Planted bugs in how requests with a grammar are masked, resumed and ended."""

from collections.abc import Iterable

from msgspec.structs import replace as replaced

from baton.actors.forward.actor import Forward
from baton.actors.forward.device import Work, WorkMask
from baton.actors.grants import RowMask
from baton.actors.messages import Admitted, Masked, Message
from baton.actors.requests import RetireReason, Stops
from baton.actors.results import constraint
from baton.actors.results.actor import ResultProcessor
from baton.actors.results.constraint import Constraint
from baton.actors.scheduler import actor as scheduler
from baton.actors.scheduler.actor import Scheduler
from baton.actors.scheduler.plan import Plan, ScheduledRow, SchedulerState, plan
from baton.actors.scheduler.rows import RunningRows
from baton.models.text.grammars.matcher import GrammarMatcher
from tests.simulation.hash_device import HashDevice
from tests.simulation.planting import Patch


def stale_mask_used(patch: Patch) -> None:
    """Planted bug: a row draws by its newest mask even if that mask is for an earlier position."""
    patch(ScheduledRow, "unmasked", property(lambda self: self.constrained and self.mask is None))


def mask_of_another_row(patch: Patch) -> None:
    """Planted bug: masks are assigned to rows in reverse order, instead of to the rows that they name."""
    original = HashDevice.run

    def run(self: HashDevice, work: Work) -> None:
        words = [mask.words for mask in reversed(work.masks)]
        masks = [WorkMask(mask.row, word) for mask, word in zip(work.masks, words, strict=True)]
        original(self, replaced(work, masks=masks))

    patch(HashDevice, "run", run)


def grammar_reset_by_a_restart(patch: Patch) -> None:
    """Planted bug: a request that is resubmitted with output starts its grammar from the beginning."""
    original = Constraint.__init__

    def init(self: Constraint, matcher: GrammarMatcher, stops: Stops, output: Iterable[int]) -> None:
        original(self, matcher, stops, ())

    patch(Constraint, "__init__", init)


def grammar_reset_by_a_retraction(patch: Patch) -> None:
    """Planted bug: a request that is admitted again after a retraction starts its grammar from the beginning."""
    original = ResultProcessor._admitted

    def admitted(self: ResultProcessor, message: Admitted) -> None:
        original(self, message)
        record = self.records[message.request.id]
        if record.request.grammar:
            record.constraint = self.constrain(record.request, [])

    patch(ResultProcessor, "_admitted", admitted)


def no_mask_for_the_next_grant(patch: Patch) -> None:
    """Planted bug: a request that is admitted again gets no mask, because it had one under its previous grant."""
    original = ResultProcessor._admitted

    def admitted(self: ResultProcessor, message: Admitted) -> None:
        known = message.request.id in self.records
        original(self, message)
        if known:
            self._unmasked.pop(message.grant, None)

    patch(ResultProcessor, "_admitted", admitted)


def matcher_not_advanced(patch: Patch) -> None:
    """Planted bug: the matcher does not consume the tokens that are drawn."""
    patch(Constraint, "consume", lambda self, token: False)


def stop_tokens_always_allowed(patch: Patch) -> None:
    """Planted bug: stop tokens are allowed even where the grammar may not end yet."""
    original = Constraint.words

    def words(self: Constraint, drawn: int) -> bytes | None:
        allowed = original(self, drawn)
        return allowed if allowed is None else constraint.with_bits(allowed, self._stops.token_ids, 1)

    patch(Constraint, "words", words)


def complete_row_keeps_running(patch: Patch) -> None:
    """Planted bug: the scheduler ignores that `Masked` lists a row whose grammar has nothing left to draw."""
    original = Scheduler.receive

    def receive(self: Scheduler, message: Message) -> None:
        original(self, Masked(message.masks, []) if isinstance(message, Masked) else message)

    patch(Scheduler, "receive", receive)


def late_masks_sent_when_the_first_has_come(patch: Patch) -> None:
    """Planted bug: a step gets its late masks when one row's has come, and the other rows draw without."""
    original = RunningRows._need_no_masks

    def need_no_masks(self: RunningRows, grants: Iterable[int]) -> None:
        grants = set(grants)
        original(self, self.state.late if grants & self.state.late else ())

    patch(RunningRows, "_need_no_masks", need_no_masks)


def late_mask_of_an_ended_row_awaited(patch: Patch) -> None:
    """Planted bug: a step waits for the late mask of a row that ended in the step before."""

    def end(self: RunningRows, grants: list[int], reason: RetireReason) -> None:
        for grant in grants:
            self.retire(grant, reason)

    patch(RunningRows, "end", end)


def late_mask_of_a_retired_row_lost(patch: Patch) -> None:
    """Planted bug: a row that retires after its step was sent gets no late mask, though its token counts."""
    original = RunningRows.mask

    def mask(self: RunningRows, masks: list[RowMask]) -> None:
        original(self, [each for each in masks if each.grant in self.state.rows])
        self._need_no_masks(each.grant for each in masks)

    patch(RunningRows, "mask", mask)


def next_step_does_not_wait_for_late_masks(patch: Patch) -> None:
    """Planted bug: the next step is planned before the late masks of the newest one have come."""
    original = plan

    def planned(state: SchedulerState) -> Plan:
        late, state.late = state.late, set()
        try:
            return original(state)
        finally:
            state.late = late

    patch(scheduler, "plan", planned)


def late_mask_applied_to_the_next_row(patch: Patch) -> None:
    """Planted bug: late masks are assigned to rows in reverse order, instead of to the rows that they name."""
    original = Forward._mask

    def mask(self: Forward, masks: list[RowMask]) -> None:
        words = [each.words for each in reversed(masks)]
        original(self, [replaced(each, words=word) for each, word in zip(masks, words, strict=True)])

    patch(Forward, "_mask", mask)
