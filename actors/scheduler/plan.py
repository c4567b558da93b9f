"""What runs next: a pure function of the scheduler's state."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from baton.actors.control import Speeds
from baton.actors.grants import Chunk, RowMask
from baton.actors.kinds import Kind
from baton.actors.lease import Lease
from baton.actors.requests import PauseMode, Request, RetireReason
from baton.actors.scheduler.queue import OpenRequest, Queue
from baton.actors.scheduler.strategy import Strategy, max_checkpoint_slots, resident_slots

# How far ahead of a row that decodes pages and checkpoint slots are asked for, in tokens.
PAGE_LEAD = 3
SLOT_LEAD = 8
# Beside rows that decode a prompt gets so many tokens at least, whatever the time.
LEAST_CHUNK = 16
# Of so many steps one may give it twice that.
PROBED = 16
# Where no time is set a step with prompts may take as long as so many without.
DECODE_STEPS = 4
# Of the ends of messages so many of the newest are worth a checkpoint.
NEWEST_ENDS = 4


@dataclass(frozen=True, slots=True)
class Limits:
    """The settings by which the scheduler plans.

    max_running: most rows at once. max_queue: most requests that wait. step_tokens: most tokens in a step, at least 2,
    of which prompts get a quarter at least. step_time: most seconds of a step with prompts in which rows decode; 0: as
    long as a few steps without prompts. page_size: positions of a KV page, 0 without attention.
    min_saving: fewer prompt tokens are computed again rather than checkpointed, unless the client asks for it.
    track_interval: its multiples in the answer are worth a checkpoint; 0: none.
    depth: most unsettled steps, 2 with overlap, else 1.
    resident: checkpoint slots that a row keeps by it, by the strategy.
    """

    max_running: int = 16
    max_queue: int = 256
    step_tokens: int = 2048
    step_time: float = 0.0
    page_size: int = 0
    min_saving: int = 16
    track_interval: int = 0
    depth: int = 2
    strategy: Strategy = Strategy.JUST_IN_TIME
    resident: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "resident", resident_slots(self.strategy, self.overlap))

    @property
    def overlap(self) -> bool:
        return self.depth > 1


@dataclass(eq=False, slots=True)
class ScheduledRow:
    """An admitted request, as far as all steps sent have brought it.

    position: tokens consumed; length: tokens given (prompt, or prompt and output after a retraction); budget: how many
    may be sampled since the admission; capacity: positions that its pages cover.
    wanted: positions to checkpoint, and what they are; named: those that slots have been asked for; spares: slots at
    hand; asked: whether some are asked for; refill: whether the resident ones of the strategy are to be. marks: the
    positions that others wait for.
    saved: positions whose state a step saves that was sent. filling: its state is on its way from host memory.
    served: when it moved last, counted in moves of rows. steady_until: see the function of this name; 0: not known.
    constrained: it has a grammar; mask: the newest that came for it.
    """

    record: OpenRequest
    grant: int
    position: int
    length: int
    budget: int
    capacity: int | None
    wanted: dict[int, Kind]
    named: set[int] = field(default_factory=set)
    marks: set[int] = field(default_factory=set)
    saved: set[int] = field(default_factory=set)
    spares: list[Lease] = field(default_factory=list)
    asked: bool = False
    refill: bool = True
    extending: bool = False
    filling: bool = False
    served: int = 0
    steady_until: int = 0
    constrained: bool = False
    mask: RowMask | None = None

    @property
    def prefilling(self) -> bool:
        return self.position < self.length

    @property
    def last(self) -> int:
        """The last position that its state can be settled at."""
        return self.length + self.budget - 1

    @property
    def suspect(self) -> bool:
        return self.position < self.record.suspect_until

    @property
    def may_draw(self) -> bool:
        """Whether its next token may be drawn: with a grammar not before the mask for that token has come."""
        return not self.constrained or (
            self.mask is not None and self.mask.position == max(self.length, self.position + 1)
        )

    @property
    def feedable(self) -> int:
        """How many tokens of its prompt may be fed; behind the last of them one is drawn."""
        return self.length - self.position - (not self.may_draw)

    def ranked(self, begin: int, end: int) -> list[int]:
        """The positions to checkpoint in (begin, end], first those that slots are to go to first."""
        return sorted((p for p in self.wanted if begin < p <= end), key=lambda p: (self.wanted[p], -p))

    def fits(self, tokens: int) -> bool:
        return self.capacity is None or self.position + tokens <= self.capacity


@dataclass(slots=True)
class SchedulerState:
    """What the scheduler knows, and `plan` decides from. Rows and requests are by grant.

    queue: requests without a row. acquiring: those of them whose Acquire is not answered.
    rows: in the order of their requests. closing: retired, with an account that is still open.
    cancelled: grants given up that the cache may still hold for. starved: rows that the cache has no page for.
    speeds: the device's. steps: those sent; in_flight: of these the unsettled ones.
    last_step_isolated: whether the last step was a suspect row's own.
    paused: how, if nothing is to run.
    """

    limits: Limits
    queue: Queue = field(default_factory=Queue)
    rows: dict[int, ScheduledRow] = field(default_factory=dict)
    acquiring: dict[int, OpenRequest] = field(default_factory=dict)
    closing: dict[int, OpenRequest] = field(default_factory=dict)
    cancelled: dict[int, OpenRequest] = field(default_factory=dict)
    starved: set[int] = field(default_factory=set)
    speeds: Speeds = field(default_factory=Speeds)
    steps: int = 0
    in_flight: int = 0
    last_step_isolated: bool = False
    paused: PauseMode | None = None

    def add(self, row: ScheduledRow) -> None:
        last = next(reversed(self.rows.values()), row)
        self.rows[row.grant] = row
        self.queue.count_row(row.record.flow, 1)
        if row.record.order < last.record.order:
            self.rows = {row.grant: row for row in sorted(self.rows.values(), key=lambda row: row.record.order)}

    def remove(self, grant: int) -> ScheduledRow | None:
        row = self.rows.pop(grant, None)
        if row is not None:
            self.queue.count_row(row.record.flow, -1)
        return row


@dataclass(slots=True)
class StepPlan:
    """decodes: rows that feed one token; sit_out: rows past their prompt that do not.

    missed: checkpoints on the way, as (grant, position), that go without for want of a slot. masks: see Step.
    """

    chunks: list[Chunk]
    decodes: list[int]
    sit_out: list[int]
    checkpoints: list[tuple[int, int]]
    missed: list[tuple[int, int]]
    isolated: bool
    masks: list[RowMask] = field(default_factory=list)


@dataclass(slots=True)
class Plan:
    acquire: list[OpenRequest] = field(default_factory=list)
    cancel: list[int] = field(default_factory=list)
    retire: list[tuple[int, RetireReason]] = field(default_factory=list)
    want: list[tuple[int, list[tuple[int, Kind]]]] = field(default_factory=list)
    extend: list[int] = field(default_factory=list)
    step: StepPlan | None = None


def plan(state: SchedulerState) -> Plan:
    """A row below its steady_until is not looked at: it decodes, and needs nothing."""
    commands = Plan()
    plan_queue(state, commands)
    if state.paused is not None:
        rows = state.rows if state.paused == "retract" else ()
        commands.retire = [(grant, "retracted") for grant in rows]
        return commands
    plan_retraction(state, commands)
    after = {}
    if state.in_flight < state.limits.depth:
        commands.step = plan_step(state, {grant for grant, _ in commands.retire})
    if commands.step is not None:
        moves = list(unsteady_moves(state, commands.step))
        plan_checkpoints(commands.step, moves)
        commands.step.masks = [row.mask for row, _, end in moves if row.mask is not None and end >= row.length]
        after = {row.grant: end for row, _, end in moves}
    for row in state.rows.values():
        if row.position >= row.steady_until:
            plan_row(state.limits, row, after.get(row.grant, row.position), commands)
    return commands


def plan_queue(state: SchedulerState, commands: Plan) -> None:
    """Ask the cache for as many of the first in the queue as there are rows.

    None while a running row lacks a page, or all is paused: then what was asked for is not wanted any more.
    """
    stopped = bool(state.starved or state.paused)
    room = 0 if stopped else max(state.limits.max_running - len(state.rows), 0)
    first = state.queue.first(room + 1)
    first, beyond = first[:room], first[room:]
    commands.acquire = [record for record in first if record.grant is None]
    wanted = {id(record) for record in first}
    commands.cancel = [grant for grant, record in state.acquiring.items() if id(record) not in wanted]
    if beyond and not stopped:
        plan_turns(state, first, beyond[0], commands)


def plan_turns(state: SchedulerState, first: list[OpenRequest], next_one: OpenRequest, commands: Plan) -> None:
    """The last row of a flow gives way to a flow that has at least two fewer, when no row is on its way out."""
    if state.closing or state.cancelled:
        return
    flows = state.queue.rows
    turn = flows[next_one.flow] + sum(record.flow == next_one.flow for record in first)
    for row in reversed(state.rows.values()):
        if flows[row.record.flow] - 1 > turn and row.record.request.priority >= next_one.request.priority:
            commands.retire.append((row.grant, "retracted"))
            return


def plan_retraction(state: SchedulerState, commands: Plan) -> None:
    """When pages are short and nothing on its way back may free some: retract the last row, never the first.

    The first, when it is alone, has grown to the limit of the pool.
    """
    if not state.starved or state.closing or state.cancelled:
        return
    rows = list(state.rows.values())
    if not any(row.grant in state.starved and not row.fits(1) for row in rows):
        return
    if len(rows) > 1:
        commands.retire.append((rows[-1].grant, "retracted"))
    elif not state.acquiring:
        commands.retire.append((rows[0].grant, "capacity"))


def plan_step(state: SchedulerState, retiring: set[int]) -> StepPlan | None:
    """The rows that are free of suspicion together, and in turn with them one that is suspect by itself.

    None of those whose state is still on its way.
    """
    rows = [row for row in state.rows.values() if not row.filling and row.grant not in retiring]
    together = [row for row in rows if row.position < row.steady_until or not row.suspect]
    alone = [row for row in rows if row.suspect][:1] if len(together) < len(rows) else []
    for group in (together, alone) if state.last_step_isolated else (alone, together):
        step = fill_step(state.limits, tokens_in_time(state), group, isolated=group is alone)
        if step.chunks or step.decodes:
            decodes = set(step.decodes)
            others = [row for row in rows if row.grant not in decodes] if len(decodes) < len(rows) else []
            step.sit_out = [row.grant for row in others if not row.prefilling]
            return step
    return None


def fill_step(limits: Limits, in_time: int, rows: list[ScheduledRow], isolated: bool) -> StepPlan:
    """Rows that can decode, and prompt chunks, each flow's first before any second, within the budget.

    A share of its tokens is for prompts, if any waits; where more rows can decode than fit, they take turns. Rows that
    decode wait for no more than `in_time` tokens of the prompts beside them.
    """
    decodable = [
        row for row in rows if row.position < row.steady_until or (not row.prefilling and row.fits(1) and row.may_draw)
    ]
    prompts = in_turns([row for row in rows if row.position < row.length and chunk_length(limits, row, 1)])
    room = max(limits.step_tokens - prompt_share(limits) * bool(prompts), 1)
    if len(decodable) > room:
        decodable.sort(key=lambda row: row.served)
    step = StepPlan([], [row.grant for row in decodable[:room]], [], [], [], isolated)
    tokens = limits.step_tokens - len(step.decodes)
    step.chunks = share_out(limits, prompts, min(tokens, in_time) if step.decodes else tokens)
    return step


def tokens_in_time(state: SchedulerState) -> int:
    """Tokens of prompts for which there is time in a step in which rows decode.

    If it takes long however few they are, they get as much again: it would keep prompts waiting for next to nothing.
    """
    limits, speeds = state.limits, state.speeds
    decode = speeds.decode
    seconds = limits.step_time or max(DECODE_STEPS * decode, decode + 2 * speeds.beside)
    if not speeds.prompt or not seconds:
        return limits.step_tokens
    # Were all steps of one size, nothing would tell what a token takes from what the step does.
    least = LEAST_CHUNK * (1 if (state.steps + 1) % PROBED else 2)
    return max(int((seconds - decode - speeds.beside) / speeds.prompt), least)


def share_out(limits: Limits, prompts: list[ScheduledRow], tokens: int) -> list[Chunk]:
    """As much to each in order as there is, but for a quarter, which is for the first prompts of the other flows."""
    firsts = {row.record.flow: row for row in reversed(prompts)}
    share = tokens // 4 // max(len(firsts) - 1, 1)
    kept = {flow: min(row.feedable, share) for flow, row in firsts.items()}
    chunks, all_kept = [], sum(kept.values())
    for row in prompts:
        all_kept -= kept.pop(row.record.flow, 0)
        length = chunk_length(limits, row, tokens - all_kept)
        if length > 0:
            chunks.append(Chunk(row.grant, length))
            tokens -= length
    return chunks


def in_turns(prompts: list[ScheduledRow]) -> list[ScheduledRow]:
    """By priority, by the number of the flow's prompts before it, and by arrival."""
    if len(prompts) < 2:
        return prompts
    turns: Counter[str] = Counter()
    ordered = []
    for row in prompts:
        priority, arrival = row.record.order
        ordered.append((priority, turns[row.record.flow], arrival, row))
        turns[row.record.flow] += 1
    return [row for *_, row in sorted(ordered, key=lambda entry: entry[:3])]


def prompt_share(limits: Limits) -> int:
    """Tokens of a step that decoding rows leave to prompts."""
    return max(limits.step_tokens // 4, 1)


def chunk_length(limits: Limits, row: ScheduledRow, budget: int) -> int:
    """As far as the budget goes; nothing while a checkpoint on the way waits for its slot, which is soon decided."""
    end = row.position + min(row.feedable, budget)
    if row.wanted and (row.asked or row.refill):
        wanted = sum(row.position < position <= end for position in row.wanted)
        if len(row.spares) < min(wanted, max_checkpoint_slots(limits.strategy, limits.overlap, wanted)):
            return 0
    return end - row.position


def unsteady_moves(state: SchedulerState, step: StepPlan) -> Iterator[tuple[ScheduledRow, int, int]]:
    """The rows of a step that are not steady, each with the positions that its state goes from and to."""
    for chunk in step.chunks:
        row = state.rows[chunk.grant]
        yield row, row.position, row.position + chunk.tokens
    for grant in step.decodes:
        row = state.rows[grant]
        if row.position >= row.steady_until:
            yield row, row.position, row.position + 1


def plan_checkpoints(step: StepPlan, moves: Iterable[tuple[ScheduledRow, int, int]]) -> None:
    """Each row's spare slots go to the positions on its way that rank first."""
    for row, begin, end in moves:
        passed = row.ranked(begin, end) if row.wanted else []
        if passed:
            step.checkpoints += [(row.grant, position) for position in sorted(passed[: len(row.spares)])]
            step.missed += [(row.grant, position) for position in passed[len(row.spares) :]]


def plan_row(limits: Limits, row: ScheduledRow, position: int, commands: Plan) -> None:
    """Pages and checkpoint slots that a row needs soon, seen from where this plan's step brings it."""
    if row.capacity is not None and not row.extending and row.capacity < min(position + PAGE_LEAD, row.last):
        commands.extend.append(row.grant)
    soon = row.ranked(position, horizon(limits, row, position)) if row.wanted else []
    most = max_checkpoint_slots(limits.strategy, limits.overlap, len(soon)) if soon else 0
    goal = max(min(len(soon), most), row.refill * limits.resident)
    if goal > len(row.spares) and not row.asked:
        # The slots at hand are for those that were named.
        soon.sort(key=row.named.__contains__)
        missing = max(min(len(soon), goal) - len(row.spares), 0)
        checkpoints = [(position, row.wanted[position]) for position in soon[:missing]]
        # What a strategy keeps at hand, before it is known for what.
        checkpoints += [(row.last, Kind.CHECKPOINT)] * (goal - len(row.spares) - len(checkpoints))
        commands.want.append((row.grant, checkpoints))


def horizon(limits: Limits, row: ScheduledRow, position: int) -> int:
    """How far two steps may bring a row, and a little more: the time in which slots are asked for."""
    return position + (2 * limits.step_tokens if position < row.length else SLOT_LEAD)


def steady_until(limits: Limits, row: ScheduledRow) -> int:
    """Below this position a row decodes in any step that has a place for it, and `plan_row` asks nothing for it.

    So `plan` need not look at it. Nothing but its own steps changes that: what it has not asked for does not come.
    """
    if row.prefilling or row.suspect or row.constrained or (row.refill and limits.resident):
        return 0
    end = row.last
    if row.capacity is not None and row.capacity < end:
        end = min(end, row.capacity - PAGE_LEAD + 1)
    if row.wanted:
        end = min(end, min(row.wanted) - SLOT_LEAD)
    if limits.track_interval:
        end = min(end, (row.position // limits.track_interval + 1) * limits.track_interval)
    return end - 1  # A step is planned for the position behind it.


def checkpoint_positions(request: Request, branch: int | None) -> dict[int, Kind]:
    """Where to checkpoint a prompt: where its client asks for it, where others part from it, and what is its own."""
    positions = own_positions(request) if request.keep != "never" else {}
    if branch is not None:
        positions[branch] = Kind.BRANCH
    return positions | dict.fromkeys(request.checkpoints, Kind.ASKED)


def own_positions(request: Request) -> dict[int, Kind]:
    """Where only those who go on from this prompt will: one token before its end, the first and newest ends.

    Of older messages the ends were kept when they were new.
    """
    ends = sorted(request.message_ends)
    positions = dict.fromkeys([*ends[:1], *ends[-NEWEST_ENDS:]], Kind.CHECKPOINT)
    positions |= dict.fromkeys(ends[-1:], Kind.LAST_END)
    positions[request.prompt_len - 1] = Kind.PROMPT_END
    return positions
