"""The pure function `plan`: what it runs next for a given state."""

import copy
import random
from collections import Counter
from typing import Any

from msgspec import structs

from baton.actors.control import Speeds
from baton.actors.grants import Chunk, Proposal, RowMask
from baton.actors.kinds import Kind
from baton.actors.lease import Ledger
from baton.actors.requests import Request, Sampling, Stops
from baton.actors.scheduler.plan import (
    LEAST_CHUNK,
    Limits,
    ScheduledRow,
    SchedulerState,
    checkpoint_positions,
    plan,
    steady_until,
)
from baton.actors.scheduler.queue import OpenRequest
from baton.actors.scheduler.strategy import Strategy
from baton.actors.tokens import pack


def record(arrival: int, length: int = 8, priority: int = 0) -> OpenRequest:
    request = Request(f"r{arrival}", pack(range(length)), length, Sampling(), Stops(100), priority=priority)
    return OpenRequest(request, arrival)


def row(grant: int, position: int, length: int = 8, capacity: int | None = None, priority: int = 0) -> ScheduledRow:
    return ScheduledRow(record(grant, length, priority), grant, position, length, 100, capacity, {})


def state(*rows: ScheduledRow, **limits: Any) -> SchedulerState:
    current = SchedulerState(Limits(**limits))
    for row in rows:
        current.add(row)
    return current


def test_decodes_come_first_and_chunks_share_the_rest_of_the_budget() -> None:
    current = state(row(1, 0, 20), row(2, 8), row(3, 0, 20), step_tokens=25)
    before = copy.deepcopy(current)
    step = plan(current).step
    assert step is not None
    assert step.decodes == [2]
    assert step.chunks == [Chunk(1, 20), Chunk(3, 4)]
    assert repr(current) == repr(before)


def constrained(grant: int, position: int, mask_at: int | None = None) -> ScheduledRow:
    """Return a row with a grammar and a prompt of eight tokens. mask_at: the position of its newest mask."""
    drawing = row(grant, position)
    drawing.constrained = True
    drawing.mask = RowMask(grant, mask_at, b"words") if mask_at is not None else None
    return drawing


def test_a_row_with_a_grammar_decodes_whether_its_mask_is_there_or_comes_late() -> None:
    step = plan(state(row(1, 9), constrained(2, 9, 9), constrained(3, 9, 10))).step
    assert step is not None
    assert step.decodes == [1, 2, 3] and step.sit_out == []
    assert step.late == [2] and step.masks == [RowMask(3, 10, b"words")]


def test_a_row_whose_last_mask_had_drafts_waits_for_the_next_one() -> None:
    drafting = constrained(2, 9, 9)
    drafting.mask = RowMask(2, 9, b"words", [b"more"], Proposal(2, 9, b"", 0.9))
    step = plan(state(row(1, 9), drafting)).step
    assert step is not None
    assert step.decodes == [1] and step.sit_out == [2] and step.late == []


def test_no_step_follows_one_whose_late_masks_have_not_come() -> None:
    waiting = state(row(1, 9))
    waiting.late = {2}
    assert plan(waiting).step is None


def test_the_first_mask_may_come_while_the_end_of_the_prompt_is_computed() -> None:
    step = plan(state(constrained(1, 0), constrained(2, 0, 8), constrained(3, 7), constrained(4, 7, 8))).step
    assert step is not None
    assert step.chunks == [Chunk(1, 8), Chunk(2, 8), Chunk(3, 1), Chunk(4, 1)]
    assert [mask.grant for mask in step.masks] == [2, 4] and step.late == [1, 3] and step.sit_out == []


def test_a_mask_is_not_sent_before_the_prompt_ends() -> None:
    step = plan(state(constrained(1, 0, 8), step_tokens=4)).step
    assert step is not None and step.chunks == [Chunk(1, 4)] and step.masks == step.late == []


def test_a_row_with_a_grammar_is_never_steady() -> None:
    assert steady_until(Limits(), constrained(1, 9, 10)) == 0 < steady_until(Limits(), row(1, 9))


def test_a_prompt_gets_its_share_even_if_more_rows_decode_than_fit() -> None:
    current = state(*(row(grant, 8) for grant in range(1, 18)), row(18, 0, 20), step_tokens=16)
    step = plan(current).step
    assert step is not None
    assert step.chunks == [Chunk(18, 4)] and len(step.decodes) == 12
    assert set(step.sit_out) == set(range(1, 18)) - set(step.decodes)


def test_the_time_of_a_mixed_step_limits_its_prompt_tokens() -> None:
    def chunk(speeds: Speeds, step_time: float, *others: ScheduledRow) -> int:
        current = state(row(1, 0, 4000), *others, step_tokens=512, step_time=step_time)
        current.speeds, current.steps = speeds, 2  # no step whose time without prompts is to be measured
        step = plan(current).step
        assert step is not None
        return step.chunks[0].tokens

    measured, decoding = Speeds(decode=0.01, prompt=0.001), row(2, 8)
    assert chunk(measured, 0.0, decoding) == 30, "four steps, one of which is the row's own"
    assert chunk(measured, 0.05, decoding) == 40
    assert chunk(measured, 9.0, decoding) == 511, "a step's tokens are the cap"
    assert chunk(measured, 0.011, decoding) == chunk(measured, 0.001, decoding) == LEAST_CHUNK
    assert chunk(measured, 0.05) == 512, "there is nobody whom a step keeps waiting"
    slow = Speeds(decode=0.01, prompt=0.001, mixed=0.02)
    assert chunk(slow, 0.05, decoding) == 20, "what the step takes anyway is not theirs"
    assert chunk(slow, 0.0, decoding) == 20, "as much again, which is more than is left of four steps"
    assert chunk(structs.replace(slow, mixed=0.2), 0.0, decoding) == 200, "however little is left"
    assert chunk(structs.replace(slow, mixed=0.2), 0.05, decoding) == LEAST_CHUNK, "a time that is set is kept"
    assert chunk(Speeds(), 0.05, decoding) == chunk(Speeds(prompt=0.001), 0.0, decoding) == 511, "nothing is known"


def test_the_time_of_a_step_without_prompts_is_measured_again_if_the_number_of_rows_has_changed() -> None:
    def timed(speeds: Speeds, *others: ScheduledRow) -> list[int]:
        """Return the steps that feed no prompt."""
        current = state(row(1, 0, 4000), *others, step_tokens=512)
        current.speeds, without = speeds, list[int]()
        for current.steps in range(64, 128):
            step = plan(current).step
            assert step is not None and len(step.decodes) == len(others)
            without += [] if step.chunks else [current.steps]
        return without

    eight = [row(grant, 8) for grant in range(2, 10)]
    known = Speeds(decode=0.01, prompt=0.001, rows=8)
    often = [number for number in range(64, 128) if number % 8 < 2]
    assert timed(known, *eight) == timed(known, *eight[:7]) == timed(known, *eight, row(10, 8), row(11, 8)) == [64, 65]
    assert timed(known, *eight[:6]) == timed(known, *eight, *(row(grant, 8) for grant in (10, 11, 12))) == often
    assert timed(Speeds(prompt=0.001), *eight) == often, "nothing is known of decoding"
    assert timed(Speeds(), *eight) == timed(known) == [], "no step is measured, or nothing decodes"


def test_rows_that_do_not_fit_into_a_step_take_turns() -> None:
    current = state(*(row(grant, 8) for grant in range(1, 8)), step_tokens=3)
    decoded: Counter[int] = Counter()
    for number in range(0, 210, 3):
        step = plan(current).step
        assert step is not None and len(step.decodes) == 3
        decoded.update(step.decodes)
        for place, grant in enumerate(step.decodes, 1):
            current.rows[grant].served = number + place
    assert set(decoded.values()) == {30}


def test_at_most_two_steps_are_in_flight() -> None:
    current = state(row(1, 8))
    current.in_flight = 1
    assert plan(current).step is not None
    current.in_flight = 2
    assert plan(current).step is None


def test_a_row_without_a_page_sits_out() -> None:
    step = plan(state(row(1, 8, capacity=8), row(2, 9, capacity=16), page_size=4)).step
    assert step is not None
    assert (step.decodes, step.sit_out) == ([2], [1])


def test_the_last_row_is_retracted_and_no_other_until_it_has_closed() -> None:
    current = state(row(1, 8, capacity=8), row(2, 8, capacity=16), row(3, 8, capacity=16, priority=-1), page_size=4)
    current.starved = {1}
    assert plan(current).retire == [(2, "retracted")]
    current.closing = {9: record(9)}
    assert plan(current).retire == []


def test_a_lone_row_that_cannot_grow_ends_by_capacity() -> None:
    current = state(row(1, 8, capacity=8), page_size=4)
    current.starved = {1}
    assert plan(current).retire == [(1, "capacity")]
    current.cancelled = {2: record(2)}
    assert plan(current).retire == []


def test_the_queue_gives_way_to_an_urgent_request() -> None:
    current = state(row(1, 8), max_running=2)
    waiting, urgent = record(2), record(3, priority=-1)
    waiting.grant = 7
    current.acquiring = {7: waiting}
    current.queue.add(waiting)
    current.queue.add(urgent)
    commands = plan(current)
    assert commands.acquire == [urgent] and commands.cancel == [7]


def test_a_chunk_waits_for_the_slot_of_a_checkpoint_on_its_way() -> None:
    current = state(row(1, 0, 20))
    current.rows[1].targets = {16: Kind.BRANCH}
    commands = plan(current)
    assert commands.step is None and commands.want == [(1, [(16, Kind.BRANCH)])]


def test_where_a_prompt_is_checkpointed() -> None:
    ends = (90, 10, 20, 30, 40, 50, 60)
    request = Request("r", pack(range(120)), 100, Sampling(), Stops(1), message_ends=ends)
    older = dict.fromkeys((10, 40, 50, 60), Kind.CHECKPOINT)
    assert checkpoint_positions(request, None) == older | {90: Kind.LAST_END, 99: Kind.PROMPT_END}
    branching = checkpoint_positions(request, 90)
    assert branching == older | {90: Kind.BRANCH, 99: Kind.PROMPT_END}, "others have gone another way there"
    assert checkpoint_positions(Request("r", pack(range(9)), 9, Sampling(), Stops(1)), None) == {8: Kind.PROMPT_END}


def test_skipping_steady_rows_changes_no_plan() -> None:
    chance, ledger, steady = random.Random(7), Ledger(4000), 0
    for _ in range(2000):
        current = random_state(chance, ledger)
        looked_at = plan(current)
        for row in current.rows.values():
            row.steady_until = steady_until(current.limits, row)
            steady += row.position < row.steady_until
        assert plan(current) == looked_at
    assert steady > 1000
    ledger.close()


def random_state(chance: random.Random, ledger: Ledger) -> SchedulerState:
    """Return a state with rows at random positions, some of which need pages or checkpoint slots."""
    limits = Limits(
        step_tokens=chance.choice([2, 4, 64]),
        page_size=4,
        track_interval=chance.choice([0, 8, 32]),
        depth=chance.choice([1, 2]),
        strategy=chance.choice(list(Strategy)),
    )
    current = SchedulerState(limits, in_flight=chance.choice([0, 0, 1]), last_step_isolated=chance.random() < 0.3)
    for grant in range(1, chance.randint(2, 8)):
        current.add(random_row(chance, grant, ledger))
    current.starved = (
        {row.grant for row in current.rows.values() if not row.fits(1)} if chance.random() < 0.5 else set()
    )
    return current


def random_row(chance: random.Random, grant: int, ledger: Ledger) -> ScheduledRow:
    length = chance.randint(1, 40)
    drawn = row(grant, chance.randint(0, length + 40), length, priority=chance.choice([0, 0, 1, -1]))
    drawn.budget = drawn.position + chance.randint(1, 60)
    drawn.capacity = chance.choice([None, max(drawn.position, 1) + chance.randint(0, 30)])
    drawn.targets = {
        drawn.position + chance.randint(1, 60): chance.choice(list(Kind)) for _ in range(chance.randint(0, 3))
    }
    drawn.record.suspect_until = chance.choice([0, 0, 0, 30])
    drawn.refill, drawn.extending = chance.random() < 0.5, chance.random() < 0.1
    drawn.awaits_spares, drawn.served = chance.random() < 0.25, chance.randint(0, 50)
    spare = ledger.take("scheduler") if chance.random() < 0.3 else None
    drawn.spares = [spare] if spare is not None else []
    return drawn
