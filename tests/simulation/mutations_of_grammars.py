"""Known bugs in what becomes of requests that have a grammar."""

from collections.abc import Iterable

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


def mask_one_step_old(patch: Patch) -> None:
    """A row draws by the newest mask that there is, though it is for the token before."""
    patch(ScheduledRow, "may_draw", property(lambda self: not self.constrained or self.mask is not None))


def mask_of_another_row(patch: Patch) -> None:
    """Masks are taken in the order in which they lie, not by their rows."""
    original = HashDevice.run

    def run(self: HashDevice, work: Work) -> None:
        words = [mask.words for mask in reversed(work.masks)]
        masks = [WorkMask(mask.row, of) for mask, of in zip(work.masks, words, strict=True)]
        original(self, Work(work.step, work.chunks, work.decodes, work.positions, work.checkpoints, masks))

    patch(HashDevice, "run", run)


def grammar_anew_after_a_restart(patch: Patch) -> None:
    """A request that comes with output begins its grammar at the beginning."""
    original = Constraint.__init__

    def init(self: Constraint, matcher: GrammarMatcher, stops: Stops, output: Iterable[int]) -> None:
        original(self, matcher, stops, ())

    patch(Constraint, "__init__", init)


def grammar_anew_after_a_retraction(patch: Patch) -> None:
    """With its next grant a request begins its grammar at the beginning."""
    original = ResultProcessor._admitted

    def admitted(self: ResultProcessor, message: Admitted) -> None:
        original(self, message)
        record = self.records[message.request.id]
        if record.request.grammar:
            record.constraint = Constraint(self.matcher(record.request.grammar), record.request.stops, ())

    patch(ResultProcessor, "_admitted", admitted)


def no_mask_for_the_next_grant(patch: Patch) -> None:
    """A request that comes back from the queue has had its mask, under the grant before."""
    original = ResultProcessor._admitted

    def admitted(self: ResultProcessor, message: Admitted) -> None:
        known = message.request.id in self.records
        original(self, message)
        if known:
            self._unmasked.pop(message.grant, None)

    patch(ResultProcessor, "_admitted", admitted)


def prompt_that_waits_for_no_mask(patch: Patch) -> None:
    """The end of a prompt is fed as soon as there is room for it."""
    patch(ScheduledRow, "feedable", property(lambda self: self.length - self.position))


def drawn_token_not_followed(patch: Patch) -> None:
    """The grammar stays where it is when the row draws."""
    patch(Constraint, "consume", lambda self, token: False)


def end_before_its_time(patch: Patch) -> None:
    """What stops a request is always allowed."""
    original = Constraint.words

    def words(self: Constraint, drawn: int) -> bytes | None:
        allowed = original(self, drawn)
        return allowed if allowed is None else constraint.with_bits(allowed, self._stops.token_ids, 1)

    patch(Constraint, "words", words)


def complete_row_not_retired(patch: Patch) -> None:
    """Word that a row has nothing to draw any more is not heard."""
    original = Scheduler.receive

    def receive(self: Scheduler, message: Message) -> None:
        original(self, Masked(message.masks, []) if isinstance(message, Masked) else message)

    patch(Scheduler, "receive", receive)
