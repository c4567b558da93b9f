"""The running rows: their steps, the slots and positions of their checkpoints, their KV pages, and how they retire."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from baton.actors.actor import Send
from baton.actors.grants import Advance, GrantPages, Proposal, RowDrafts, RowMask
from baton.actors.kinds import Kind
from baton.actors.messages import (
    Admit,
    Checkpoint,
    Extend,
    Extended,
    Free,
    Granted,
    Passed,
    Retire,
    Spare,
    Step,
    StepMasks,
    Want,
)
from baton.actors.requests import Request, RetireReason
from baton.actors.scheduler.plan import steady_until, worth_saving
from baton.actors.scheduler.queue import OpenRequest
from baton.actors.scheduler.state import ScheduledRow, SchedulerState, StepPlan
from baton.actors.scheduler.strategy import max_checkpoint_slots
from baton.actors.tokens import count, pack

# For so many tokens a row with a grammar does not wait for masks with drafts, after a step has not fed those of one.
DECLINED = 16


@dataclass
class RunningRows:
    """The running rows, and what the scheduler does with them. `plan` decides it, from the same state.

    A row that has retired is unknown here: what still arrives for it is ignored, and slots are freed.
    """

    send: Send
    state: SchedulerState
    counters: Counter[str]
    positions: Callable[[Request, int | None], dict[int, Kind]]  # see Scheduler.positions
    wants: set[int] = field(default_factory=set)  # grants with a Want that is not answered
    _new_pages: dict[int, list[int]] = field(default_factory=dict)  # pages for the next Step, by grant
    _late: list[RowMask] = field(default_factory=list)  # the late masks of the newest step that have come
    _served: int = 0  # how many times rows have advanced

    def __post_init__(self) -> None:
        limits = self.state.limits
        self._keeps_checkpoints = max_checkpoint_slots(limits.strategy, limits.overlap, 1) > 0

    def admit(self, record: OpenRequest, granted: Granted) -> None:
        """Give a granted request a row."""
        request, size = record.request, self.state.limits.page_size
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
        self.send(
            "forward",
            Admit(
                grant=granted.grant,
                request=request,
                state=granted.state,
                hit=granted.hit,
                moved=granted.moved,
                loan=granted.loan,
                pages=granted.pages,
                page_copy=granted.page_copy,
                fill=granted.fill,
            ),
        )

    def _targets(self, request: Request, granted: Granted) -> dict[int, Kind]:
        """Return the positions to checkpoint that are far enough past the granted state to be worth a slot."""
        if not self._keeps_checkpoints:
            return {}
        positions = self.positions(request, granted.branch)
        return worth_saving(positions, granted.hit.cached_tokens, count(request.tokens), self.state.limits.min_saving)

    def filled(self, grant: int) -> None:
        """Let steps include a row, whose state has arrived from host memory."""
        if grant in self.state.rows:
            self.state.rows[grant].filling = False

    def mask(self, masks: list[RowMask]) -> None:
        """Keep the newest mask of each row, and those that the newest step waits for."""
        for mask in masks:
            if mask.grant in self.state.rows:
                self.state.rows[mask.grant].mask = mask
            if mask.grant in self.state.late:
                self._late.append(mask)
        self._need_no_masks(mask.grant for mask in masks)

    def end(self, grants: list[int], reason: RetireReason) -> None:
        """Retire rows that have ended in a step. They get no further mask."""
        self._need_no_masks(grants)
        for grant in grants:
            self.retire(grant, reason)

    def _need_no_masks(self, grants: Iterable[int]) -> None:
        """Note rows whose late mask has come, or never will. If these were the last, send the step its masks."""
        late = self.state.late
        if late:
            late.difference_update(grants)
            if not late:
                self.send("forward", StepMasks(self.state.steps, self._late))
                self._late = []

    def retire(self, grant: int, reason: RetireReason) -> None:
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

    # Checkpoints

    def want(self, grant: int, checkpoints: list[tuple[int, Kind]]) -> None:
        """Ask for a row's checkpoint slots, for these positions and kinds."""
        row = self.state.rows.get(grant)
        if row is not None:
            row.awaits_spares, row.refill = True, False
            row.requested.update(position for position, _ in checkpoints)
            self.wants.add(grant)
            self.send("cache", Want(grant, checkpoints))

    def spare(self, spare: Spare) -> None:
        """Give a row its checkpoint slots. Denied positions are not saved. The slots of a retired row are freed."""
        self.wants.discard(spare.grant)
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

    def mark(self, grant: int, position: int) -> None:
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

    def _checkpoint(self, grant: int, position: int) -> Checkpoint:
        row = self.state.rows[grant]
        row.refill = True
        row.saved.add(position)
        return Checkpoint(grant, position, row.spares.pop())

    # KV pages

    def extend(self, grants: list[int]) -> None:
        """Ask for a page for each of these rows."""
        grants = [grant for grant in grants if grant in self.state.rows]
        for grant in grants:
            self.state.rows[grant].extending = True
        if grants:
            self.send("cache", Extend(grants))

    def extended(self, extended: Extended) -> None:
        """Keep the new pages for the next Step, and note which rows the cache has no page for."""
        for addition in extended.pages:
            row = self.state.rows.get(addition.grant)
            if row is not None and row.capacity is not None:
                row.capacity += len(addition.pages) * self.state.limits.page_size
                row.extending = False
                self._new_pages.setdefault(addition.grant, []).extend(addition.pages)
        self.state.starved = {grant for grant in extended.starved if grant in self.state.rows}

    # Steps

    def step(self, step: StepPlan) -> None:
        """Send a planned step, and advance its rows."""
        state = self.state
        state.steps += 1
        state.in_flight += 1
        state.last_step_isolated = step.isolated
        state.drafting = bool(step.drafts or step.predict)
        state.late = set(step.late)
        for grant, position in step.missed:
            if position in state.rows[grant].marks:
                self.send("cache", Passed(grant, position))
        for grant, position in [*step.missed, *step.checkpoints]:
            del state.rows[grant].targets[position]
        self.counters["checkpoints_skipped"] += len(step.missed)
        self.send(
            "forward",
            Step(
                step=state.steps,
                chunks=step.chunks,
                sit_out=step.sit_out,
                checkpoints=[self._checkpoint(grant, position) for grant, position in step.checkpoints],
                pages=[GrantPages(grant, pages) for grant, pages in self._new_pages.items()],
                masks=step.masks,
                late=step.late,
                drafts=[RowDrafts(grant, pack(tokens)) for grant, tokens in step.drafts.items()],
                propose=step.propose,
                predict=step.predict,
            ),
        )
        self._new_pages.clear()
        self._note_declined(step)
        rows = state.rows
        for chunk in step.chunks:
            self._advance(rows[chunk.grant], chunk.tokens)
        for grant in step.decodes:
            self._advance(rows[grant], 1)

    def _note_declined(self, step: StepPlan) -> None:
        """Note rows that waited for a mask with drafts and do not feed them: the wait halves their speed."""
        for mask in step.masks:
            row = self.state.rows[mask.grant]
            if step.propose and row.mask is not None and row.mask.proposal and row.grant not in step.drafts:
                row.undrafted_until = row.position + DECLINED

    def settle(self, advanced: list[Advance], proposals: list[Proposal], chance: float) -> None:
        """Advance rows by their accepted drafts, and keep the proposals for the next step."""
        self.state.in_flight -= 1
        self.state.drafting = self.state.drafting and self.state.in_flight > 0
        rows = self.state.rows
        for advance in advanced:
            if advance.accepted and advance.grant in rows:
                self._advance(rows[advance.grant], advance.accepted)
        self.state.propose(proposals, chance)

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
        interval = self.state.limits.track_interval
        if not interval or not self._keeps_checkpoints or row.record.request.keep == "never":
            pass  # no checkpoints in the output
        elif begin < row.length or row.position // interval > begin // interval:
            boundary = (row.position // interval + 1) * interval
            if boundary <= row.last:
                row.targets[boundary] = Kind.CHECKPOINT
        if row.position == row.last:
            self.retire(row.grant, "limit")

    def find_steady(self) -> None:
        """Find, for each row that has reached it, the next position before which nothing happens to the row."""
        for row in self.state.rows.values():
            if row.position >= row.steady_until:
                row.steady_until = steady_until(self.state.limits, row)
