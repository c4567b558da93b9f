"""Decide what runs next. `plan` is a pure function of the scheduler's state: it changes nothing and sends nothing."""

from collections import Counter
from collections.abc import Iterable, Iterator

from baton.actors.grants import Chunk
from baton.actors.kinds import Kind
from baton.actors.requests import BY_HEAD, Request
from baton.actors.scheduler.drafts import mask_of, most_proposed, plan_drafts
from baton.actors.scheduler.predictions import plan_predictions
from baton.actors.scheduler.queue import OpenRequest
from baton.actors.scheduler.state import Limits, Plan, ScheduledRow, SchedulerState, StepPlan
from baton.actors.scheduler.strategy import max_checkpoint_slots

# A decoding row requests its next page, or a checkpoint slot, this many tokens in advance: the cache's answer takes a
# round trip, during which up to two steps are in flight.
PAGE_LEAD = 3
SLOT_LEAD = 8
# Prompts get at least this many tokens in a mixed step, even if its time budget allows fewer.
LEAST_CHUNK = 16
# One step in 16 may use twice LEAST_CHUNK, so that the speed estimate sees more than one step size.
WIDE_EVERY = 16
# Without --step-time a mixed step may take as long as this many steps without prompts.
DECODE_STEPS = 4
# Two steps in TIME_EVERY may leave prompts out, so that the time of a step without prompts is measured: if it is known
# for more than NEAR times as many rows only, or as few; two steps in RETIME_EVERY in any case. The first one is not
# measured if it replays drafts of the step before it, or if no step before it had as many rows: it is recorded then.
TIME_EVERY, RETIME_EVERY, NEAR = 8, 64, 1.25
# A prompt gets a checkpoint at its first message end and at this many of its last message ends.
NEWEST_ENDS = 4


def plan(state: SchedulerState) -> Plan:
    """Decide what to do next: requests to acquire, cancel or retract, what rows need, and what the next step runs.

    Rows below their `steady_until` are skipped: they keep decoding and need no pages or checkpoint slots. This keeps
    the cost of a plan low when many rows decode.
    """
    commands = Plan()
    plan_queue(state, commands)
    if state.paused is not None:
        rows = state.rows if state.paused == "retract" else ()
        commands.retire = [(grant, "retracted") for grant in rows]
        return commands
    plan_retraction(state, commands)
    after = {}  # by grant: positions after this step, of those of its rows that are not steady
    # After a step with drafts, the positions of its rows are known only when it is settled.
    if state.in_flight < state.limits.depth and not state.drafting and not state.late:
        commands.step = plan_step(state, {grant for grant, _ in commands.retire})
    if commands.step is not None:
        moves = list(unsteady_moves(state, commands.step))
        plan_checkpoints(commands.step, moves)
        # A row draws a token, and so needs its mask, only if the step brings it to its prompt's end or further.
        drawing = [row for row, _, end in moves if end >= row.length]
        may_draft = state.limits.drafts and not commands.step.is_timed
        if may_draft and (commands.step.decodes or (drawing and state.limits.predictions)):
            commands.step.drafts = plan_drafts(state, commands.step)
            commands.step.predict = plan_predictions(state, commands.step)
            commands.step.propose = most_proposed(state, commands.step)
        drafts = commands.step.drafts
        commands.step.late = [row.grant for row in drawing if row.unmasked]
        masks = [mask_of(row, len(drafts.get(row.grant, ()))) for row in drawing if not row.unmasked]
        commands.step.masks = [mask for mask in masks if mask is not None]
        after = {row.grant: end for row, _, end in moves}
    for row in state.rows.values():
        if row.position >= row.steady_until:
            plan_row(state.limits, row, after.get(row.grant, row.position), commands)
    return commands


def plan_queue(state: SchedulerState, commands: Plan) -> None:
    """Acquire the first requests in the queue, as many as there are free rows; cancel the Acquires of all others.

    Acquire nothing in a pause, or while a running row lacks a page: a new request would take the pages that it needs.
    A cancelled request is acquired again when the cache has answered: only then is known how often it was overtaken.
    """
    stopped = bool(state.starved or state.paused)
    room = 0 if stopped else max(state.limits.max_running - len(state.rows), 0)
    first = state.queue.first(room + 1)
    first, beyond = first[:room], first[room:]
    cancelled = {id(record) for record in state.cancelled.values()}
    commands.acquire = [record for record in first if record.grant is None and id(record) not in cancelled]
    chosen = {id(record) for record in first}
    commands.cancel = [grant for grant, record in state.acquiring.items() if id(record) not in chosen]
    if beyond and not stopped:
        plan_turns(state, first, beyond[0], commands)


def plan_turns(state: SchedulerState, first: list[OpenRequest], next_one: OpenRequest, commands: Plan) -> None:
    """Retract a row whose flow has at least two rows more than the flow of `next_one`, unless the row is more urgent.

    next_one: the first waiting request that gets no free row. first: the requests before it, which get one each.
    """
    # Retract one row at a time: an account that is about to close frees a row, so compare again after that.
    if state.closing or state.cancelled:
        return
    flows = state.queue.rows
    # How many rows the flow of next_one will have when the requests in `first` are admitted.
    turn = flows[next_one.flow] + sum(record.flow == next_one.flow for record in first)
    for row in reversed(state.rows.values()):
        # After the swap the larger flow still has at least as many rows as the other, so they do not swap back.
        if flows[row.record.flow] - 1 > turn and row.record.request.priority >= next_one.request.priority:
            commands.retire.append((row.grant, "retracted"))
            return


def plan_retraction(state: SchedulerState, commands: Plan) -> None:
    """Retract the last row if a row lacks a page. If there is only one row, it has filled the pool: finish it.

    The first row is never retracted, so at least one request always makes progress.
    """
    # An account that is about to close may free pages: wait for it before another row is retracted.
    if not state.starved or state.closing or state.cancelled:
        return
    rows = list(state.rows.values())
    # A starved row can wait while its pages have space for its next token.
    if not any(row.grant in state.starved and not row.fits(1) for row in rows):
        return
    if len(rows) > 1:
        commands.retire.append((rows[-1].grant, "retracted"))
    elif not state.acquiring:  # plan_queue cancels open Acquires first: their grants may hold pages.
        commands.retire.append((rows[0].grant, "capacity"))


def plan_step(state: SchedulerState, retiring: set[int]) -> StepPlan | None:
    """Plan a step for all rows that are not suspect, or for the first suspect row alone, in alternation.

    A row is suspect until it is past the position at which a step with it failed. It runs alone, so that another
    failure harms no other request. Rows that still wait for their state from host memory are left out. Return None if
    no row can run.
    """
    rows = [row for row in state.rows.values() if not row.filling and row.grant not in retiring]
    # Steady rows are never suspect, and this comparison is cheaper than `suspect`.
    together = [row for row in rows if row.position < row.steady_until or not row.suspect]
    alone = [row for row in rows if row.suspect][:1] if len(together) < len(rows) else []
    for group in (together, alone) if state.last_step_isolated else (alone, together):
        step = fill_step(state, group, isolated=group is alone)
        if step.chunks or step.decodes:
            decodes = set(step.decodes)
            others = [row for row in rows if row.grant not in decodes] if len(decodes) < len(rows) else []
            step.sit_out = [row.grant for row in others if not row.prefilling]
            return step
    return None


def fill_step(state: SchedulerState, rows: list[ScheduledRow], isolated: bool) -> StepPlan:
    """Fill a step with decoding rows and prompt chunks, within limits.step_tokens.

    While prompts wait, a quarter of the tokens is reserved for them. If more rows can decode than fit, they take turns.
    If rows decode, the time for prompts is limited, so that inter-token latency stays low.

    rows: the candidates. isolated: whether the only candidate is a suspect row.
    """
    limits = state.limits
    # decode
    decodable = [row for row in rows if row.position < row.steady_until or row.may_decode]
    # A prompt that cannot feed even one token waits for a checkpoint slot.
    prompts = in_turns([row for row in rows if row.position < row.length and chunk_length(limits, row, 1)])
    room = max(limits.step_tokens - prompt_share(limits) * bool(prompts), 1)
    if len(decodable) > room:
        decodable.sort(key=lambda row: row.served)
    step = StepPlan([], [row.grant for row in decodable[:room]], [], [], [], isolated)
    # prefill
    tokens = limits.step_tokens - len(step.decodes)
    step.is_timed = bool(prompts and step.decodes) and is_to_be_timed(state, len(step.decodes))
    if step.decodes:
        tokens = 0 if step.is_timed else min(tokens, tokens_in_time(state))
    step.chunks = share_out(limits, prompts, tokens)
    return step


def is_to_be_timed(state: SchedulerState, rows: int) -> bool:
    """Return whether prompts are left out of a step, so that its time without them is measured.

    Otherwise no such step would run while prompts wait: after the number of rows has grown, the time budget of mixed
    steps would stay too small, and prompts would wait even longer.

    rows: how many rows decode in the step.
    """
    speeds, steps = state.speeds, state.steps
    if not speeds.prompt or steps % TIME_EVERY > 1:
        return False
    return steps % RETIME_EVERY <= 1 or not speeds.rows / NEAR <= rows <= speeds.rows * NEAR


def tokens_in_time(state: SchedulerState) -> int:
    """Return how many prompt tokens a mixed step has time for.

    A mixed step has a fixed cost (`speeds.mixed`), which decoding rows pay even for a single prompt token. Prompt
    tokens get at least as much time as that cost: with less, prompts would wait longer and rows would gain little.
    """
    limits, speeds = state.limits, state.speeds
    decode = speeds.decode
    seconds = limits.step_time or max(DECODE_STEPS * decode, decode + 2 * speeds.mixed)
    if not speeds.prompt or not seconds:
        return limits.step_tokens  # nothing has been measured yet
    # If all steps had one size, a token's cost could not be separated from the step's fixed cost.
    least = LEAST_CHUNK * (1 if (state.steps + 1) % WIDE_EVERY else 2)
    return max(int((seconds - decode - speeds.mixed) / speeds.prompt), least)


def share_out(limits: Limits, prompts: list[ScheduledRow], tokens: int) -> list[Chunk]:
    """Hand out prompt tokens in order, but reserve a quarter for the first prompts of other flows, shortest first.

    This keeps a long prompt from delaying a short prompt of another flow. Only a few prompts advance in a step, because
    it reads and writes the state of each row that it advances, however few its tokens are.
    """
    firsts: dict[str, ScheduledRow] = {}
    for row in prompts:
        firsts.setdefault(row.record.flow, row)
    reserved, room = dict[int, int](), tokens // 4
    for row in sorted([*firsts.values()][1:], key=lambda row: (row.record.request.priority, row.length - row.position)):
        reserved[row.grant] = min(row.length - row.position, room)
        room -= reserved[row.grant]
    chunks, all_reserved = [], sum(reserved.values())
    for row in prompts:
        # End this row's reservation: tokens that it does not use go to the prompts after it.
        all_reserved -= reserved.get(row.grant, 0)
        length = chunk_length(limits, row, tokens - all_reserved)
        if length > 0:
            chunks.append(Chunk(row.grant, length))
            tokens -= length
    return chunks


def in_turns(prompts: list[ScheduledRow]) -> list[ScheduledRow]:
    """Sort prompts by priority, then by how many prompts of the same flow are before it, then by arrival."""
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
    """Return how many tokens of a step are reserved for prompts."""
    return max(limits.step_tokens // 4, 1)


def chunk_length(limits: Limits, row: ScheduledRow, budget: int) -> int:
    """Return how many prompt tokens to feed, at most `budget`.

    Return 0 while a checkpoint in the chunk waits for its slot. The cache answers at once, and a row that has passed
    the position can no longer save it.
    """
    end = min(row.position + budget, row.length)
    if row.targets and (row.awaits_spares or row.refill):
        crossed = sum(row.position < position <= end for position in row.targets)
        if len(row.spares) < min(crossed, max_checkpoint_slots(limits.strategy, limits.overlap, crossed)):
            return 0
    return end - row.position


def unsteady_moves(state: SchedulerState, step: StepPlan) -> Iterator[tuple[ScheduledRow, int, int]]:
    """Yield each row of the step that is not steady, with its positions before and after the step."""
    for chunk in step.chunks:
        row = state.rows[chunk.grant]
        yield row, row.position, row.position + chunk.tokens
    for grant in step.decodes:
        row = state.rows[grant]
        if row.position >= row.steady_until:
            yield row, row.position, row.position + 1


def plan_checkpoints(step: StepPlan, moves: Iterable[tuple[ScheduledRow, int, int]]) -> None:
    """Give each row's spare slots to the best-ranked positions that the step crosses; the others go to `step.missed`.

    moves: rows with their positions before and after the step.
    """
    for row, begin, end in moves:
        passed = row.ranked(begin, end) if row.targets else []
        if passed:
            step.checkpoints += [(row.grant, position) for position in sorted(passed[: len(row.spares)])]
            step.missed += [(row.grant, position) for position in passed[len(row.spares) :]]


def plan_row(limits: Limits, row: ScheduledRow, position: int, commands: Plan) -> None:
    """Request the pages and checkpoint slots that a row will need soon.

    position: where the row stands after this plan's step.
    """
    # No page is needed past `row.last`: the final token is not fed.
    lead = page_lead(limits, row) + (limits.drafts if row.proposal else 0)
    if row.capacity is not None and not row.extending and row.capacity < min(position + lead, row.last):
        commands.extend.append(row.grant)
    soon = row.ranked(position, horizon(limits, row, position)) if row.targets else []
    most = max_checkpoint_slots(limits.strategy, limits.overlap, len(soon)) if soon else 0
    goal = max(min(len(soon), most), row.refill * limits.resident)
    if goal > len(row.spares) and not row.awaits_spares:
        # The row's spare slots were requested for the positions in `requested`, so put other positions first.
        # The sort is stable: within both groups the rank decides.
        soon.sort(key=row.requested.__contains__)
        missing = max(min(len(soon), goal) - len(row.spares), 0)
        checkpoints = [(position, row.targets[position]) for position in soon[:missing]]
        # A strategy with resident slots requests slots before positions are known: such a Want names `row.last`.
        checkpoints += [(row.last, Kind.CHECKPOINT)] * (goal - len(row.spares) - len(checkpoints))
        commands.want.append((row.grant, checkpoints))


def horizon(limits: Limits, row: ScheduledRow, position: int) -> int:
    """Return the position up to which to request checkpoint slots: about as far as two steps may bring the row."""
    return position + (2 * limits.step_tokens if position < row.length else SLOT_LEAD + limits.drafts)


def page_lead(limits: Limits, row: ScheduledRow) -> int:
    """Return how many tokens in advance a row requests its next page. Predictions need pages ahead of the row."""
    return PAGE_LEAD + (limits.predictions if row.record.request.speculation in BY_HEAD else 0)


def steady_until(limits: Limits, row: ScheduledRow) -> int:
    """Return the position below which a row is *steady*: it decodes in every step with room, and needs nothing else.

    `plan` skips steady rows. Only a row's own steps can end this: the cache answers only rows that have requested
    something, and a Mark concerns the prompt, which the row has passed. Return 0 if the row needs attention now.
    """
    if row.prefilling or row.suspect or row.constrained or (row.refill and limits.resident):
        return 0
    if row.proposal or row.extending or row.awaits_spares:
        return 0
    end = row.last
    if row.capacity is not None and row.capacity < end:
        end = min(end, row.capacity - page_lead(limits, row) + 1)
    if row.targets:
        end = min(end, min(row.targets) - SLOT_LEAD - limits.drafts)
    if limits.track_interval:
        end = min(end, (row.position // limits.track_interval + 1) * limits.track_interval)
    return end - 1  # `plan_row` looks at the position after the step, which is one further.


def checkpoint_positions(request: Request, branch: int | None) -> dict[int, Kind]:
    """Return the positions at which to checkpoint a prompt, each with the kind of the state there.

    These are the positions that the client asks for, `branch`, where other requests diverge from the prompt, and
    `own_positions`.
    """
    positions = own_positions(request) if request.keep != "never" else {}
    if branch is not None:
        positions[branch] = Kind.BRANCH
    return positions | dict.fromkeys(request.checkpoints, Kind.ASKED)


def worth_saving(positions: dict[int, Kind], start: int, end: int, min_saving: int) -> dict[int, Kind]:
    """Return those positions before `end` that save at least `min_saving` tokens from `start` on, or are asked for."""
    least = max(min_saving, 1)
    return {p: kind for p, kind in positions.items() if p - start >= (1 if kind is Kind.ASKED else least) and p < end}


def own_positions(request: Request) -> dict[int, Kind]:
    """Return the positions that serve later requests which repeat or extend this prompt.

    These are one token before the prompt's end, the end of its first message, which is often a shared system prompt,
    and the newest message ends. Older message ends were checkpointed when they were new.
    """
    ends = sorted(request.message_ends)
    positions = dict.fromkeys([*ends[:1], *ends[-NEWEST_ENDS:]], Kind.CHECKPOINT)
    positions |= dict.fromkeys(ends[-1:], Kind.LAST_END)
    positions[request.prompt_len - 1] = Kind.PROMPT_END
    return positions
