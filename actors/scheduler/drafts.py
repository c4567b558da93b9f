"""How many drafts each row feeds in a step: as many as bring the most tokens a second, by what steps have cost."""

from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

from baton.actors.grants import RowMask
from baton.actors.scheduler.state import ScheduledRow, SchedulerState, StepPlan
from baton.actors.tokens import unpack

# A step with drafts must promise at least this many times the tokens a second of a step without: chances and costs are
# estimates, and a row without drafts never waits for its step to be settled.
LEAST_GAIN = 1.2
# Until the cost of a draft has been measured, it counts as this share of a step without prompts.
UNKNOWN_COST = 1 / 8
# In one step of this many, drafts count as if they cost nothing, so that their cost is measured again.
FREE_EVERY = 256
# In two steps of this many there are no drafts. The second replays none either, so that a plain step is measured again.
PLAIN_EVERY = 512


def plan_drafts(state: SchedulerState, step: StepPlan) -> dict[int, list[int]]:
    """Return the drafts of the step's decoding rows, by grant.

    Each draft is chosen while it adds more tokens a second than the step has without it. A row's drafts become less
    likely one by one, because each counts only if all before it are right.
    """
    room = state.limits.step_tokens - len(step.decodes) - sum(chunk.tokens for chunk in step.chunks)
    usable = {grant: drafts for grant in step.decodes if (drafts := usable_drafts(state, state.rows[grant]))}
    found = costs(state, step)
    if not usable or found is None or phase(state) in (0, 1):
        return {}
    rows, (alone, each, turn) = len(step.decodes), found
    tokens, seconds = float(rows), alone + turn
    chosen: dict[int, int] = {}
    likely = [(-drafts.first, grant) for grant, drafts in usable.items()]  # each row's next draft, by falling chance
    heapify(likely)
    while likely and room > 0:
        gain, grant = -likely[0][0], likely[0][1]
        if gain * seconds <= each * tokens:
            break
        tokens, seconds, room = tokens + gain, seconds + each, room - 1
        chosen[grant] = chosen.get(grant, 0) + 1
        if chosen[grant] < len(usable[grant].tokens):
            heapreplace(likely, (-gain * usable[grant].chance, grant))
        else:
            heappop(likely)
    if tokens * alone < LEAST_GAIN * rows * seconds:
        return {}
    return {grant: usable[grant].tokens[:number] for grant, number in chosen.items()}


class Usable(NamedTuple):
    """The drafts that a row could feed in the next step."""

    tokens: list[int]
    first: float  # how likely the first of them is right
    chance: float  # how likely each other one is right if those before it are


def usable_drafts(state: SchedulerState, row: ScheduledRow) -> Usable | None:
    """Return what a row could feed of its proposal after its last token; None if that is nothing.

    Drafts end before the token at the end of the budget, the end of the row's pages, and the next checkpoint: after a
    step, a slot holds the state before the drafts, so the step that reaches a checkpoint feeds its token first.
    """
    proposal, first = row.proposal, row.position + 1
    if row.constrained:
        proposal = row.mask.proposal if row.mask is not None and not row.unmasked else None
    if proposal is None or row.suspect:
        return None
    most = min(state.limits.drafts, row.last - first)
    if row.capacity is not None:
        most = min(most, row.capacity - first)
    if targets := [position for position in row.targets if position > first]:
        most = min(most, min(targets) - 1 - first)
    # With a step in flight, the row feeds a token that is not known yet, and the first proposal stands for it.
    skipped = first - proposal.position
    tokens = unpack(proposal.tokens)[skipped : skipped + most] if most > 0 and skipped >= 0 else []
    return Usable(tokens, proposal.chance ** (1 + skipped), proposal.chance) if tokens else None


def mask_of(row: ScheduledRow, drafts: int) -> RowMask | None:
    """Return the row's mask for a step that feeds this many drafts; None if it has none."""
    mask = row.mask
    return mask and RowMask(mask.grant, mask.position, mask.words, mask.ahead[:drafts])


def phase(state: SchedulerState) -> int:
    """Return where the next step stands in PLAIN_EVERY steps; 0 and 1 have no drafts."""
    return (state.steps + PLAIN_EVERY // 2) % PLAIN_EVERY


def costs(state: SchedulerState, step: StepPlan) -> tuple[float, float, float] | None:
    """Return the seconds of the step without drafts, of each draft, and of the wait for a step with drafts.

    Return None until a step without drafts has been measured: only against such steps can the others be. In one step of
    FREE_EVERY all but the step itself cost nothing.
    """
    speeds, prompts = state.speeds, sum(chunk.tokens for chunk in step.chunks)
    if not speeds.decode:
        return None
    if (state.steps + 1) % FREE_EVERY == 0:
        return 1.0, 0.0, 0.0
    alone = speeds.decode + (speeds.mixed + prompts * speeds.prompt if prompts else 0.0)
    return alone, speeds.draft or UNKNOWN_COST * speeds.decode, speeds.turn


def most_proposed(state: SchedulerState, step: StepPlan) -> int:
    """Return how many tokens results is to propose for each row after this step; 0 if even right ones would not pay.

    One more than a step feeds: with a step in flight, the first stands for its token.
    """
    found, most = costs(state, step), state.limits.drafts
    if found is None:
        return 0
    alone, each, turn = found
    pays = (1 + most) * alone > LEAST_GAIN * (alone + turn + each * most * len(step.decodes))
    pays = pays or bool(step.predict) or 2 * alone > LEAST_GAIN * (alone + turn + each * len(step.decodes))
    # The step whose drafts cost nothing is planned from what is proposed after one of the steps before it.
    is_probed_soon = (state.steps + 1) % FREE_EVERY >= FREE_EVERY - state.limits.depth
    return most + state.limits.depth - 1 if pays or is_probed_soon else 0
