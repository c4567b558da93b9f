"""Planted bugs in how flows of requests take turns for rows and for the tokens of a step."""

from baton.actors.grants import Chunk
from baton.actors.scheduler import plan
from baton.actors.scheduler.plan import Limits, ScheduledRow, chunk_length
from baton.actors.scheduler.queue import Entry, Queue
from tests.simulation.planting import Patch


def first_come_first_served(patch: Patch) -> None:
    """Planted bug: among requests of one priority, rows go to the earliest, however many rows their flow has."""

    def entry(self: Queue, flow: str, place: int) -> Entry:
        priority, arrival = self._waiting[flow][place].order
        return priority, 0, arrival, flow, place

    patch(Queue, "_entry", entry)
    patch(Queue, "_take_head", _take_head)


def running_rows_not_counted(patch: Patch) -> None:
    """Planted bug: a request's turn counts the waiting requests of its flow, but not the rows that the flow has."""

    def entry(self: Queue, flow: str, place: int) -> Entry:
        priority, arrival = self._waiting[flow][place].order
        return priority, place, arrival, flow, place

    patch(Queue, "_entry", entry)
    patch(Queue, "_take_head", _take_head)


def first_prompt_takes_all(patch: Patch) -> None:
    """Planted bug: the first prompt gets every token that it can use, and nothing is reserved for other flows."""

    def share_out(limits: Limits, prompts: list[ScheduledRow], tokens: int) -> list[Chunk]:
        chunks = []
        for row in prompts:
            length = chunk_length(limits, row, tokens)
            if length > 0:
                chunks.append(Chunk(row.grant, length))
                tokens -= length
        return chunks

    patch(plan, "share_out", share_out)


def step_time_ignored(patch: Patch) -> None:
    """Planted bug: prompts get as many tokens as fit into a step, however much that delays decoding rows."""
    patch(plan, "tokens_in_time", lambda state: state.limits.step_tokens)


def prompts_left_out_while_rows_decode(patch: Patch) -> None:
    """Planted bug: every step in which rows decode is timed without prompts, so that prompts starve."""
    patch(plan, "is_to_be_timed", lambda state, rows: state.speeds.prompt > 0)


def no_row_retracted_for_a_flow(patch: Patch) -> None:
    """Planted bug: a flow that holds all rows keeps them until its requests end."""
    patch(plan, "plan_turns", lambda *_: None)


def _take_head(self: Queue, flow: str) -> list[object]:
    """Remove a flow as Queue._take_head does. Unlike that method, find its heap entry by a scan."""
    self._heads = [entry for entry in self._heads if entry[3] != flow]
    return list(self._waiting.pop(flow, []))
