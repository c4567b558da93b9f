"""The scheduler's state, from which `plan` decides, and the Plan that `plan` returns."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.actors.control import Speeds
from baton.actors.grants import Chunk, Proposal, RowMask
from baton.actors.kinds import Kind
from baton.actors.lease import Lease
from baton.actors.requests import PauseMode, RetireReason
from baton.actors.scheduler.queue import OpenRequest, Queue
from baton.actors.scheduler.strategy import Strategy, resident_slots


@dataclass(frozen=True, slots=True)
class Limits:
    """The scheduler's settings."""

    max_running: int = 16  # most rows at once
    max_queue: int = 256  # most requests that wait
    step_tokens: int = 2048  # most tokens in a step, at least 2; a quarter is reserved for prompts
    step_time: float = 0.0  # most seconds of a mixed step; 0: derived from the time of a step without prompts
    page_size: int = 0  # tokens of a KV page, 0 without attention
    min_saving: int = 16  # a checkpoint must save at least this many prompt tokens, unless the client asks for it
    track_interval: int = 0  # checkpoint the output at multiples of this many tokens; 0: never
    depth: int = 2  # most unsettled steps: 2 with overlap, else 1
    drafts: int = 0  # most drafts of a row in a step; 0: no drafts
    predictions: int = 0  # most tokens that the model's own head predicts for a row after a step; 0: it has none
    strategy: Strategy = Strategy.JUST_IN_TIME
    resident: int = field(init=False)  # checkpoint slots that a row holds all the time, which follow from the strategy

    def __post_init__(self) -> None:
        object.__setattr__(self, "resident", resident_slots(self.strategy, self.overlap))

    @property
    def overlap(self) -> bool:
        return self.depth > 1


@dataclass(eq=False, slots=True)
class ScheduledRow:
    """An admitted request, with the values that it will have after all steps that have been sent."""

    record: OpenRequest
    grant: int
    position: int  # tokens that the state has consumed
    length: int  # tokens that the request was admitted with: the prompt, and after a retraction also the output so far
    budget: int  # most tokens to sample in this admission
    capacity: int | None  # positions that the row's pages cover; None without attention
    targets: dict[int, Kind]  # positions ahead to checkpoint, each with the kind of the state there
    requested: set[int] = field(default_factory=set)  # positions for which a Want has requested a slot
    marks: set[int] = field(default_factory=set)  # positions whose state other requests wait for
    saved: set[int] = field(default_factory=set)  # positions whose states are saved by a step that has been sent
    spares: list[Lease] = field(default_factory=list)  # the row's unused checkpoint slots
    awaits_spares: bool = False  # a Want has not been answered yet
    refill: bool = True  # request slots again, up to Limits.resident
    extending: bool = False  # an Extend has not been answered yet
    filling: bool = False  # the state is still on its way from host memory
    served: int = 0  # when the row last advanced, counted in advances of all rows: lower is served first
    steady_until: int = 0  # see `steady_until` in plan.py; 0: not known
    constrained: bool = False  # the request has a grammar
    mask: RowMask | None = None  # the newest mask that results has sent
    undrafted_until: int = 0  # below this position no drafts are expected: those that came with a mask did not pay
    proposal: Proposal | None = None  # what results proposed after the newest step; None: nothing

    @property
    def prefilling(self) -> bool:
        return self.position < self.length

    @property
    def last(self) -> int:
        """The largest position that the state can reach: the last token of the budget is not fed."""
        return self.length + self.budget - 1

    @property
    def suspect(self) -> bool:
        """Whether a step that included this row failed at a position that it has not passed yet."""
        return self.position < self.record.suspect_until

    @property
    def unmasked(self) -> bool:
        """Whether the row has a grammar, and the mask for its next token has not come."""
        if not self.constrained:
            return False
        return self.mask is None or self.mask.position < max(self.length, self.position + 1)

    @property
    def may_decode(self) -> bool:
        """Whether a step may decode the row: it is past its prompt, has room, and its mask has come or may come late.

        Wait for a mask if the one before had a proposal: the next one is likely to have drafts for the step to feed.
        """
        if self.prefilling or not self.fits(1):
            return False
        has_drafts = self.mask is not None and self.mask.proposal is not None and self.position >= self.undrafted_until
        return not (self.unmasked and has_drafts)

    def ranked(self, begin: int, end: int) -> list[int]:
        """Return the positions to checkpoint in (begin, end], in the order in which they get slots."""
        return sorted((p for p in self.targets if begin < p <= end), key=lambda p: (self.targets[p], -p))

    def fits(self, tokens: int) -> bool:
        """Return whether the row's pages cover this many more tokens."""
        return self.capacity is None or self.position + tokens <= self.capacity


@dataclass(slots=True)
class SchedulerState:
    """The state from which `plan` decides. Dicts are keyed by grant."""

    limits: Limits
    queue: Queue = field(default_factory=Queue)  # requests without a row
    rows: dict[int, ScheduledRow] = field(default_factory=dict)  # in the order of (priority, arrival)
    acquiring: dict[int, OpenRequest] = field(default_factory=dict)  # queued requests whose Acquire is not answered yet
    closing: dict[int, OpenRequest] = field(default_factory=dict)  # retired requests whose accounts are still open
    cancelled: dict[int, OpenRequest] = field(default_factory=dict)  # whose Acquire is cancelled, but may be granted
    starved: set[int] = field(default_factory=set)  # rows for which the cache has no page
    speeds: Speeds = field(default_factory=Speeds)
    proposed: list[ScheduledRow] = field(default_factory=list)  # the rows with a proposal
    steps: int = 0  # steps sent
    in_flight: int = 0  # steps sent and not settled
    ended: int = 0  # rows given back
    late: set[int] = field(default_factory=set)  # rows of the newest step whose late masks have not come
    drafting: bool = False  # the newest step has drafts or predictions and is not settled: the next one waits for it
    chance: float = 0.0  # how likely a predicted token is right if those before it are; 0: nothing was predicted yet
    last_step_isolated: bool = False  # the last step was for a suspect row alone
    paused: PauseMode | None = None  # the mode of the pause; None: not paused

    def add(self, row: ScheduledRow) -> None:
        """Add a row, and keep rows in the order of (priority, arrival)."""
        last = next(reversed(self.rows.values()), row)
        self.rows[row.grant] = row
        self.queue.count_row(row.record.flow, 1)
        if row.record.order < last.record.order:
            self.rows = {row.grant: row for row in sorted(self.rows.values(), key=lambda row: row.record.order)}

    def propose(self, proposals: Sequence[Proposal], chance: float) -> None:
        """Replace the proposals of all rows by these, and the chance of predictions."""
        self.chance = chance
        for row in self.proposed:
            row.proposal = None
        self.proposed = [self.rows[proposal.grant] for proposal in proposals if proposal.grant in self.rows]
        for proposal in proposals:
            if proposal.grant in self.rows:
                row = self.rows[proposal.grant]
                row.proposal, row.steady_until = proposal, 0

    def remove(self, grant: int) -> ScheduledRow | None:
        """Remove a row, and return it; None if there is none."""
        row = self.rows.pop(grant, None)
        if row is not None:
            self.ended += 1
            self.queue.count_row(row.record.flow, -1)
        return row


@dataclass(slots=True)
class StepPlan:
    """The contents of the next step. Rows are named by their grants."""

    chunks: list[Chunk]  # prompt tokens to feed
    decodes: list[int]  # rows that decode one token
    sit_out: list[int]  # rows past their prompt that do not decode in this step
    checkpoints: list[tuple[int, int]]  # (grant, position) of states to save, for which there are slots
    missed: list[tuple[int, int]]  # (grant, position) of states that are not saved, because a slot is missing
    isolated: bool  # the step is for a suspect row alone
    is_timed: bool = False  # prompts and drafts are left out, so that the time without them is measured
    masks: list[RowMask] = field(default_factory=list)  # the masks of the rows that draw a token in this step
    late: list[int] = field(default_factory=list)  # rows that draw a token in this step, and whose masks come later
    drafts: dict[int, list[int]] = field(default_factory=dict)  # by grant: the drafts that rows in `decodes` feed
    propose: int = 0  # most tokens that results is to propose for each row after this step
    predict: list[Chunk] = field(default_factory=list)  # rows, each with the tokens to predict after this step


@dataclass(slots=True)
class Plan:
    """The scheduler's next actions."""

    acquire: list[OpenRequest] = field(default_factory=list)  # requests for which to send an Acquire
    cancel: list[int] = field(default_factory=list)  # grants whose Acquire to take back
    retire: list[tuple[int, RetireReason]] = field(default_factory=list)  # grants whose rows to retire
    want: list[tuple[int, list[tuple[int, Kind]]]] = field(default_factory=list)  # the fields of each Want
    extend: list[int] = field(default_factory=list)  # grants that need a page
    step: StepPlan | None = None  # None: no step now
