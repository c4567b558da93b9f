"""Running rows in the scheduler: their steps, pages and checkpoints."""

from baton.actors.kinds import Kind
from baton.actors.messages import (
    Abort,
    Chunk,
    Closed,
    Drain,
    Extend,
    Extended,
    Free,
    GrantPages,
    Over,
    Requeue,
    Retire,
    Settled,
    Spare,
    Step,
    Submit,
    Want,
)
from baton.actors.requests import Request, Sampling, Stops
from baton.actors.scheduler.strategy import Strategy
from baton.actors.tokens import pack
from tests.actors.scheduler.desk import Desk


def test_a_row_is_retired_when_its_remaining_budget_is_used(desk: Desk) -> None:
    request = Request("a", pack(range(6)), 4, Sampling(), Stops(4))
    desk.receive(Submit(request))
    desk.grant(1)
    assert len(desk.of(Step)) == 2 and desk.of(Retire) == [Retire(1, "limit", 7)], (
        "two of four tokens are there already"
    )


def test_rows_that_do_not_fit_into_a_step_move_in_turn() -> None:
    desk = Desk(max_running=3, step_tokens=2)
    for grant, name in enumerate(("a", "b", "c"), 1):
        desk.submit(name, length=1, max_tokens=30)
        desk.grant(grant)
    for _ in range(12):
        desk.settle()
    assert [step.step for step in desk.of(Step)] == list(range(1, len(desk.of(Step)) + 1))
    resting = [step.sit_out for step in desk.of(Step) if not step.chunks][-9:]
    assert sorted(map(tuple, resting)) == [(1,)] * 3 + [(2,)] * 3 + [(3,)] * 3


def test_a_suspect_row_and_the_others_run_in_turn(desk: Desk) -> None:
    request = desk.submit("a", length=1)
    desk.grant(1)
    desk.settle(failed=(1,))
    desk.receive(Requeue(request, 50))
    desk.submit("b", length=1)
    desk.grant(2)
    desk.grant(3)
    for _ in range(6):
        desk.settle()
    resting = [step.sit_out for step in desk.of(Step) if not step.chunks][-4:]
    assert resting in ([[2], [3]] * 2, [[3], [2]] * 2)


def test_a_requeued_request_is_before_later_arrivals(desk: Desk) -> None:
    first = desk.submit("a")
    desk.grant(1)
    desk.submit("b")
    desk.grant(2)
    desk.submit("c")
    desk.settle(failed=(1,))
    desk.receive(Requeue(first, 3))
    assert [record.request.id for record in desk.scheduler.state.queue] == ["a", "c"]


def test_a_row_requests_a_page_in_time_and_waits_for_it() -> None:
    desk = Desk(page_size=4)
    desk.submit("a", length=6)
    desk.grant(1, pages=(0, 1))
    # After the two steps in flight the row is at position 7. Two more steps would pass the end of its pages, at 8.
    assert desk.of(Extend) == [Extend([1])]
    desk.settle()
    assert len(desk.of(Step)) == 3, "its pages cover eight positions"
    desk.settle()
    assert len(desk.of(Step)) == 3 and desk.of(Extend) == [Extend([1])]
    desk.take()
    desk.receive(Extended([GrantPages(1, [5])], []))
    [step] = desk.of(Step)
    assert step.pages == [GrantPages(1, [5])]
    desk.settle()
    assert desk.of(Step)[-1].pages == [] and len(desk.of(Step)) == 2


def test_a_row_requests_no_page_that_it_will_not_use() -> None:
    desk = Desk(page_size=4)
    desk.submit("a", length=6, max_tokens=3)
    desk.grant(1, pages=(0, 1))
    assert not desk.of(Extend)
    assert desk.of(Step) and desk.scheduler.state.rows[1].last == 8


def test_an_extended_for_a_retired_row_is_ignored() -> None:
    desk = Desk(page_size=4, max_running=2)
    for grant, name in ((1, "a"), (2, "b")):
        desk.submit(name, length=6)
        desk.grant(grant, pages=(2 * grant, 2 * grant + 1))
    desk.receive(Abort("a"))
    desk.take()
    desk.receive(Extended([GrantPages(1, [8])], [1, 2]))
    assert desk.scheduler.state.starved == {2}
    desk.receive(Closed(1))
    desk.settle()
    desk.settle()
    assert all(step.pages == [] for step in desk.of(Step))


def test_the_last_row_is_retracted_when_a_row_lacks_a_page() -> None:
    desk = Desk(page_size=4, max_running=2, step_tokens=64)
    for grant, name in ((1, "a"), (2, "b")):
        desk.submit(name, length=7)
        desk.grant(grant, pages=(2 * grant, 2 * grant + 1))
    for _ in range(4):
        desk.settle()
    desk.receive(Extended([], [1, 2]))
    assert desk.of(Retire) == [Retire(2, "retracted", 8)]
    assert desk.counted == {"rows_retracted": 1}


# Checkpoints


def test_checkpoint_slots_are_requested_ahead_and_used_at_their_positions() -> None:
    desk = Desk(strategy=Strategy.JUST_IN_TIME, step_tokens=4, min_saving=1)
    desk.submit("a", length=10)
    desk.grant(1, branch=6)
    both = [(6, Kind.BRANCH), (9, Kind.PROMPT_END)]
    assert desk.of(Want) == [Want(1, both)] and len(desk.of(Step)) == 1, "the second step would pass a wanted position"
    desk.receive(Spare(1, [desk.lease(), desk.lease()], []))
    desk.settle()
    desk.settle()
    marked = [(c.position, c.grant) for step in desk.of(Step) for c in step.checkpoints]
    assert marked == [(6, 1), (9, 1)]
    assert not desk.scheduler.state.rows[1].spares and not desk.counted


def test_a_position_that_is_denied_a_slot_is_not_saved() -> None:
    desk = Desk(strategy=Strategy.JUST_IN_TIME, step_tokens=4, min_saving=1)
    desk.submit("a", length=10)
    desk.grant(1, branch=6)
    desk.receive(Spare(1, [desk.lease()], [6]))
    for _ in range(3):
        desk.settle()
    assert [c.position for step in desk.of(Step) for c in step.checkpoints] == [9]
    assert desk.counted == {"checkpoints_skipped": 1}


def test_spare_slots_of_a_retired_row_are_freed() -> None:
    desk = Desk(strategy=Strategy.JUST_IN_TIME, step_tokens=4, min_saving=1)
    desk.submit("a", length=10)
    desk.grant(1, branch=6)
    desk.receive(Abort("a"))
    late = desk.lease()
    desk.receive(Spare(1, [late], [6]))
    desk.receive(Spare(1, [], [6, 9]))
    assert [free.leases for free in desk.of(Free)] == [[late]]
    other = Desk(strategy=Strategy.EXTRA_BUFFER)
    other.submit("a")
    other.grant(1)
    [want] = other.of(Want)
    assert [kind for _, kind in want.checkpoints] == [Kind.CHECKPOINT] * 2
    other.receive(Spare(1, [other.lease(), other.lease()], []))
    assert len(list(other.scheduler.leases())) == 2
    other.receive(Abort("a"))
    assert [len(free.leases) for free in other.of(Free)] == [2]
    assert not list(other.scheduler.leases())


def test_a_resident_slot_is_requested_again_after_it_was_used() -> None:
    desk = Desk(strategy=Strategy.EXTRA_BUFFER, step_tokens=4, min_saving=1)
    desk.submit("a", length=10)
    desk.grant(1)
    desk.receive(Spare(1, [desk.lease(), desk.lease()], []))
    assert [len(want.checkpoints) for want in desk.of(Want)] == [2]
    desk.settle()
    desk.settle()
    assert [c.position for step in desk.of(Step) for c in step.checkpoints] == [9]
    assert [len(want.checkpoints) for want in desk.of(Want)[1:]] == [1]
    desk.receive(Spare(1, [desk.lease()], []))
    assert len(list(desk.scheduler.leases())) == 2 and len(desk.of(Want)) == 2


def test_answers_are_checkpointed_at_multiples_of_the_interval() -> None:
    desk = Desk(strategy=Strategy.JUST_IN_TIME, track_interval=4)
    desk.submit("a", length=3, max_tokens=11)
    desk.grant(1)
    for _ in range(12):
        for want in desk.of(Want):
            desk.sent.remove(("cache", want))
            desk.receive(Spare(1, [desk.lease() for _ in want.checkpoints], []))
        desk.settle()
    assert [c.position for step in desk.of(Step) for c in step.checkpoints] == [8, 12]
    assert desk.counted == {"checkpoints_skipped": 1}, "the first came up sooner than a slot could come"


def test_no_buffer_saves_no_checkpoint(desk: Desk) -> None:
    desk.submit("a", length=10)
    desk.grant(1, branch=6)
    assert not desk.of(Want) and not desk.scheduler.state.rows[1].targets


# The end


def test_the_drain_starts_when_everything_has_come_back() -> None:
    desk = Desk(strategy=Strategy.JUST_IN_TIME, step_tokens=4, min_saving=1)
    desk.submit("a", length=10)
    desk.grant(1, branch=6)
    desk.receive(Drain())
    desk.submit("late")
    assert desk.ended == [("api", "late", "draining")]
    desk.receive(Abort("a"))
    for message in (Settled(1, []), Spare(1, [], [6, 9]), Over("a"), Closed(1)):
        assert not desk.of(Drain), f"before {message}"
        desk.receive(message)
    assert [to for to, message in desk.sent if isinstance(message, Drain)] == ["forward"]
    desk.receive(Closed(1))
    assert len(desk.of(Drain)) == 1
    desk.submit("later")
    assert desk.ended[-1] == ("api", "later", "draining")


def test_a_chunk_is_not_cut_short_by_rows_that_decode(desk: Desk) -> None:
    desk.submit("a", length=4)
    desk.grant(1)
    desk.settle()
    desk.submit("b", length=20)
    desk.grant(2)
    desk.settle()
    assert desk.of(Step)[-1].chunks == [Chunk(2, 7)] and desk.of(Step)[-1].sit_out == []
