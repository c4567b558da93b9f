"""Planted bugs in how requests with a grammar are masked, resumed and ended."""

from collections.abc import Iterable

from msgspec.structs import replace as replaced

from baton.actors.forward.device import Work, WorkMask
from baton.actors.messages import Admitted, Masked, Message
from baton.actors.requests import Stops
from baton.actors.results import constraint
from baton.actors.results.actor import ResultProcessor
from baton.actors.results.constraint import Constraint
from baton.actors.scheduler.actor import Scheduler
from baton.actors.scheduler.plan import ScheduledRow
from baton.models.text.grammars.matcher import GrammarMatcher
from tests.simulation.hash_device import HashDevice
from tests.simulation.planting import Patch


def stale_mask_used(patch: Patch) -> None:
    """Planted bug: a row draws by its newest mask even if that mask is for an earlier position."""
    patch(ScheduledRow, "may_draw", property(lambda self: not self.constrained or self.mask is not None))


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


def prompt_end_fed_without_a_mask(patch: Patch) -> None:
    """Planted bug: the last prompt token is fed without waiting for the mask of the first output token."""
    patch(ScheduledRow, "feedable", property(lambda self: self.length - self.position))


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
