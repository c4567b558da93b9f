"""How many tokens the model's own head predicts for each row after a step, to be fed as drafts in the next one."""

from collections.abc import Iterator
from itertools import chain, repeat

from baton.actors.grants import LIKELY, Chunk
from baton.actors.requests import BY_HEAD
from baton.actors.scheduler.drafts import FREE_EVERY, LEAST_GAIN, PLAIN_EVERY, UNKNOWN_COST, phase
from baton.actors.scheduler.state import ScheduledRow, SchedulerState, StepPlan

# Until tokens were predicted, a predicted token counts as right with this probability.
UNKNOWN_CHANCE = 1 / 2
# If predictions do not pay, this many steps before one whose drafts may cost nothing predict a token all the same: the
# costs of predictions and drafts, and how often they are right, may have changed.
TRIED = 2


def plan_predictions(state: SchedulerState, step: StepPlan) -> list[Chunk]:
    """Return the rows for which the model's head predicts tokens after the step, each with their number."""
    rows = dict(predictable(state, step)) if state.limits.predictions and state.speeds.decode else {}
    # Before a step without drafts, nothing is predicted.
    if not rows or phase(state) in (PLAIN_EVERY - 1, 0, 1):
        return []
    all_rows = len(step.decodes) + sum(chunk.grant in rows for chunk in step.chunks)
    is_tried = 0 < FREE_EVERY - 1 - state.steps % FREE_EVERY <= TRIED
    most = best_number(state, len(rows), max(all_rows, len(rows))) or int(is_tried)
    return [Chunk(grant, min(most, useful)) for grant, useful in rows.items()] if most else []


def best_number(state: SchedulerState, rows: int, all_rows: int) -> int:
    """Return the number of tokens to predict that promises the most tokens a second; 0 if none promises more.

    It follows from the measured costs, and from how often predicted tokens were right.

    rows: how many rows get predictions, of `all_rows` that draw.
    """
    speeds, chance = state.speeds, state.chance or UNKNOWN_CHANCE
    each, prediction = (seconds or UNKNOWN_COST * speeds.decode for seconds in (speeds.draft, speeds.prediction))
    tokens, seconds = float(all_rows), speeds.decode + speeds.turn
    best, most = LEAST_GAIN * all_rows / speeds.decode, 0
    for number in range(1, state.limits.predictions + 1):
        tokens, seconds = tokens + rows * chance**number, seconds + prediction + rows * each
        if tokens / seconds > best:
            best, most = tokens / seconds, number
    return most


def predictable(state: SchedulerState, step: StepPlan) -> Iterator[tuple[int, int]]:
    """Yield the rows that draw a token in a step and may feed drafts after it, each with the most that it can feed."""
    for grant, tokens in chain(((chunk.grant, chunk.tokens) for chunk in step.chunks), zip(step.decodes, repeat(1))):
        row = state.rows[grant]
        end, chance = row.position + tokens, state.chance or UNKNOWN_CHANCE
        useful = row.last - end - 1
        if end >= row.length and useful > 0 and may_predict(row, chance):
            yield grant, useful


def may_predict(row: ScheduledRow, chance: float) -> bool:
    """Return whether to predict tokens for a row, which are right with this chance.

    It is of no use if the row has a likelier proposal, or a grammar and predictions are unlikely.
    """
    if row.suspect or row.record.request.speculation not in BY_HEAD or (row.constrained and chance < LIKELY):
        return False
    return row.proposal is None or row.proposal.chance <= chance
