"""Planted bugs of the turns that flows of requests take."""

from baton.actors.grants import Chunk
from baton.actors.scheduler import plan
from baton.actors.scheduler.plan import Limits, ScheduledRow, chunk_length
from baton.actors.scheduler.queue import Entry, Queue
from tests.simulation.planting import Patch


def first_come_first_served(patch: Patch) -> None:
    """Of one priority, who came first gets the next row, however many of its flow there are."""

    def entry(self: Queue, flow: str, place: int) -> Entry:
        priority, arrival = self._waiting[flow][place].order
        return priority, 0, arrival, flow, place

    patch(Queue, "_entry", entry)
    patch(Queue, "_take_head", _take_head)


def rows_are_no_turns(patch: Patch) -> None:
    """A flow's turns are counted among those that wait: its rows do not count."""

    def entry(self: Queue, flow: str, place: int) -> Entry:
        priority, arrival = self._waiting[flow][place].order
        return priority, place, arrival, flow, place

    patch(Queue, "_entry", entry)
    patch(Queue, "_take_head", _take_head)


def first_prompt_takes_all(patch: Patch) -> None:
    """What the first prompt can use of a step no other gets."""

    def share_out(limits: Limits, prompts: list[ScheduledRow], tokens: int) -> list[Chunk]:
        chunks = []
        for row in prompts:
            length = chunk_length(limits, row, tokens)
            if length > 0:
                chunks.append(Chunk(row.grant, length))
                tokens -= length
        return chunks

    patch(plan, "share_out", share_out)


def prompts_take_their_time(patch: Patch) -> None:
    """Rows that decode wait for as many tokens of prompts as a step may have."""
    patch(plan, "tokens_in_time", lambda state: state.limits.step_tokens)


def nobody_gives_way(patch: Patch) -> None:
    """A flow that has all rows keeps them until they end."""
    patch(plan, "plan_turns", lambda *_: None)


def _take_head(self: Queue, flow: str) -> list[object]:
    """As it is, wherever its entry is."""
    self._heads = [entry for entry in self._heads if entry[3] != flow]
    return list(self._waiting.pop(flow, []))
