"""The needs of rows: pages and checkpoint slots in advance; which row is retracted; how suspect rows run."""

from typing import Any

import pytest

from baton.actors.kinds import Kind
from baton.actors.lease import Lease, Ledger
from baton.actors.requests import Request, Sampling, Stops
from baton.actors.scheduler.plan import (
    Limits,
    OpenRequest,
    Plan,
    ScheduledRow,
    SchedulerState,
    StepPlan,
    chunk_length,
    horizon,
    plan,
    plan_checkpoints,
    plan_row,
    prompt_share,
)
from baton.actors.scheduler.strategy import (
    MOST_AT_ONCE,
    Strategy,
    max_checkpoint_slots,
    resident_slots,
    slots_per_request,
)
from baton.actors.tokens import pack

LEDGER = Ledger(8)
SPARES = [lease for lease in (LEDGER.take("scheduler") for _ in range(8)) if lease is not None]
LEDGER.close()


def row(grant: int, position: int, length: int = 8, budget: int = 100, **more: Any) -> ScheduledRow:
    request = Request(f"r{grant}", pack(range(length)), length, Sampling(), Stops(budget))
    record = OpenRequest(request, grant, suspect_until=more.pop("suspect_until", 0))
    return ScheduledRow(
        record, grant, position, length, budget, more.pop("capacity", None), more.pop("targets", {}), **more
    )


def spares(count: int) -> list[Lease]:
    return SPARES[:count]


def state(*rows: ScheduledRow, **limits: Any) -> SchedulerState:
    return SchedulerState(Limits(**limits), rows={row.grant: row for row in rows})


def needs(row: ScheduledRow, position: int | None = None, **limits: Any) -> Plan:
    commands = Plan()
    plan_row(Limits(**limits), row, row.position if position is None else position, commands)
    return commands


@pytest.mark.parametrize(
    ("position", "capacity", "budget", "asks"),
    [(9, 12, 100, False), (10, 12, 100, True), (10, 12, 5, False), (10, 12, 6, True), (10, None, 100, False)],
)
def test_a_page_is_requested_two_steps_ahead_if_it_will_be_used(
    position: int, capacity: int | None, budget: int, asks: bool
) -> None:
    assert needs(row(1, position, capacity=capacity, budget=budget)).extend == [1] * asks
    assert needs(row(1, position, capacity=capacity, budget=budget, extending=True)).extend == []


def test_how_far_ahead_slots_are_requested() -> None:
    limits = Limits(step_tokens=16)
    assert horizon(limits, row(1, 0), 7) == 7 + 32 and horizon(limits, row(1, 0), 8) == 8 + 8
    targets = dict.fromkeys((3, 8, 16, 17), Kind.CHECKPOINT)
    [eighth, sixteenth, seventeenth] = [(position, Kind.CHECKPOINT) for position in (8, 16, 17)]
    assert needs(row(1, 3, targets=dict(targets)), step_tokens=4).want == [(1, [eighth])]
    assert needs(row(1, 8, targets=dict(targets)), step_tokens=4).want == [(1, [sixteenth])]
    assert needs(row(1, 9, targets=dict(targets)), step_tokens=4).want == [(1, [seventeenth, sixteenth])]
    for requested, missing in ((17, sixteenth), (16, seventeenth)):
        with_spare = row(1, 9, targets=dict(targets), spares=spares(1), requested={requested})
        assert needs(with_spare).want == [(1, [missing])], "the spare slot is for the other"
    assert needs(row(1, 9, targets=dict(targets), spares=spares(2))).want == []
    assert needs(row(1, 9, targets=dict(targets), awaits_spares=True)).want == []


@pytest.mark.parametrize(
    ("strategy", "depth", "resident", "most"),
    [
        (Strategy.NO_BUFFER, 2, 0, 0),
        (Strategy.EXTRA_BUFFER, 2, 2, 2),
        (Strategy.EXTRA_BUFFER, 1, 1, 1),
        (Strategy.EXTRA_BUFFER_LAZY, 2, 1, 2),
        (Strategy.JUST_IN_TIME, 2, 0, MOST_AT_ONCE),
    ],
)
def test_how_many_slots_each_strategy_holds_and_requests(
    strategy: Strategy, depth: int, resident: int, most: int
) -> None:
    overlap = depth > 1
    assert Limits(depth=depth).overlap is overlap
    assert resident_slots(strategy, overlap) == resident and slots_per_request(strategy, overlap) == 1 + resident
    assert max_checkpoint_slots(strategy, overlap, 5) == most
    chosen = {"strategy": strategy, "depth": depth, "step_tokens": 4}
    at_hand = [(row(1, 9).last, Kind.CHECKPOINT)] * resident
    assert needs(row(1, 9), **chosen).want == [(1, at_hand)] * (resident > 0)
    assert needs(row(1, 9, refill=False), **chosen).want == []
    soon = {"targets": dict.fromkeys((11, 12, 13, 14, 15), Kind.CHECKPOINT), "refill": False}
    newest = [(position, Kind.CHECKPOINT) for position in (15, 14, 13, 12, 11)]
    assert needs(row(1, 9, **soon), **chosen).want == [(1, newest[:most])] * (most > 0)


def test_a_chunk_waits_for_a_checkpoint_only_while_its_slot_may_come() -> None:
    options, limits = {"targets": {6: Kind.BRANCH}, "refill": False}, Limits()
    assert chunk_length(limits, row(1, 2, **options), 3) == 3, "it ends before the checkpoint"
    assert chunk_length(limits, row(1, 2, **options, awaits_spares=True), 4) == 0
    assert chunk_length(limits, row(1, 2, **options, awaits_spares=True, spares=spares(1)), 4) == 4
    assert chunk_length(limits, row(1, 2, **options), 4) == 4, "no slot will come"
    assert chunk_length(limits, row(1, 2, targets={6: Kind.BRANCH}), 4) == 0, "one is about to be asked for"
    assert chunk_length(limits, row(1, 6, targets={6: Kind.BRANCH}), 9) == 2, "it is passed, and the prompt ends"
    many = {"targets": dict.fromkeys((3, 4, 5, 6, 7), Kind.CHECKPOINT), "spares": spares(MOST_AT_ONCE)}
    assert chunk_length(limits, row(1, 2, **many), 6) == 6, "it has as many as it may"


def test_a_quarter_of_a_step_is_reserved_for_prompts() -> None:
    assert [prompt_share(Limits(step_tokens=tokens)) for tokens in (2, 7, 8, 100)] == [1, 1, 2, 25]


def test_spare_slots_go_to_the_positions_that_rank_first() -> None:
    step = StepPlan([], [1], [], [], [], False)
    plan_checkpoints(step, [(row(1, 8, targets={9: Kind.BRANCH}, spares=spares(1)), 8, 9)])
    assert (step.checkpoints, step.missed) == ([(1, 9)], [])
    prompt = state(
        row(
            1,
            0,
            20,
            targets={4: Kind.CHECKPOINT, 8: Kind.BRANCH, 12: Kind.LAST_END, 0: Kind.BRANCH},
            spares=spares(2),
            refill=False,
        ),
        step_tokens=12,
    )
    chosen = plan(prompt).step
    assert chosen is not None
    assert (chosen.checkpoints, chosen.missed) == ([(1, 8), (1, 12)], [(1, 4)])


def test_a_suspect_row_runs_alone_in_turn_with_the_others() -> None:
    rows = [row(1, 8), row(2, 8, suspect_until=9), row(3, 8, suspect_until=9), row(4, 9, suspect_until=9)]
    current = state(*rows)
    first = plan(current).step
    assert first is not None and (first.decodes, first.isolated, first.sit_out) == ([2], True, [1, 3, 4])
    current.last_step_isolated = True
    second = plan(current).step
    assert second is not None and (second.decodes, second.isolated, second.sit_out) == ([1, 4], False, [2, 3])
    del current.rows[1], current.rows[4]
    third = plan(current).step
    assert third is not None and (third.decodes, third.isolated) == ([2], True), "there is nobody else"


def test_which_row_is_retracted_when_one_lacks_a_page() -> None:
    first, last = row(1, 8, capacity=8), row(2, 8, capacity=8)
    current = state(first, last, page_size=4)
    assert plan(current).retire == []
    current.starved = {1}
    assert plan(current).retire == [(2, "retracted")]
    current.cancelled = {9: first.record}
    assert plan(current).retire == [], "what was cancelled may hold pages"
    current.cancelled, current.closing = {}, {9: first.record}
    assert plan(current).retire == []
    current.closing = {}
    first.capacity = 9
    assert plan(current).retire == [], "the row that waits can still run"
    current.starved = {2}
    assert plan(current).retire == [(2, "retracted")], "it lacks a page itself"
    del current.rows[2]
    first.capacity, current.starved = 8, {1}
    current.acquiring = {9: last.record}
    assert plan(current).retire == [], "an Acquire may be granted still"
    current.acquiring = {}
    assert plan(current).retire == [(1, "capacity")] and plan(current).step is None


def test_no_request_is_acquired_while_a_row_lacks_a_page() -> None:
    current = state(row(1, 8, capacity=20), max_running=3)
    records = [row(grant, 0).record for grant in (2, 3, 4)]
    for record in records:
        current.queue.add(record)
    assert [record.arrival for record in plan(current).acquire] == [2, 3]
    records[0].grant, current.acquiring = 7, {7: records[0]}
    assert [record.arrival for record in plan(current).acquire] == [3] and plan(current).cancel == []
    current.starved = {1}
    commands = plan(current)
    assert (commands.acquire, commands.cancel) == ([], [7])


def test_the_order_of_rows_is_that_of_priority_then_arrival() -> None:
    rows = [row(grant, 0, 8) for grant in (3, 1, 2)]
    rows[0].record.request = Request("r", pack(range(8)), 8, Sampling(), Stops(9), priority=-1)
    step = plan(state(*rows, step_tokens=20)).step
    assert step is not None and [(chunk.grant, chunk.tokens) for chunk in step.chunks] == [(3, 8), (1, 8), (2, 4)]
