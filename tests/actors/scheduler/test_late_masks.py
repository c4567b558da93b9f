"""Late masks: when the scheduler sends them, and for which rows it waits."""

from baton.actors.control import Speeds
from baton.actors.grants import Proposal, RowMask
from baton.actors.messages import Abort, Granted, Masked, Step, StepMasks
from baton.actors.requests import Hit
from baton.actors.tokens import pack
from tests.actors.scheduler.desk import Desk


def masked(grant: int, position: int) -> RowMask:
    return RowMask(grant, position, b"words %d" % position)


def constrained(rows: int, max_tokens: int = 9, **limits: int) -> Desk:
    """Return a desk whose rows, with prompts of four tokens and a grammar, all draw in step 1, without their masks."""
    desk = Desk(max_running=rows, step_tokens=64, depth=2, **limits)
    for grant in range(1, rows + 1):
        desk.submit(f"r{grant}", max_tokens=max_tokens, grammar="g")
    for grant in range(1, rows + 1):
        desk.scheduler.receive(granted(desk, grant))
    desk.scheduler.act()
    assert [step.late for step in desk.of(Step)] == [list(range(1, rows + 1))]
    return desk


def granted(desk: Desk, grant: int) -> Granted:
    return Granted(grant, desk.lease(), Hit(), False, None, [], None, None)


def test_a_step_gets_its_masks_when_the_last_one_has_come_and_only_then_the_next_step_follows() -> None:
    desk = constrained(2)
    desk.receive(Masked([masked(2, 4)], []))
    assert not desk.of(StepMasks) and len(desk.of(Step)) == 1
    desk.receive(Masked([masked(1, 4)], []))
    assert desk.of(StepMasks) == [StepMasks(1, [masked(2, 4), masked(1, 4)])]
    assert desk.of(Step)[-1].late == [1, 2] and desk.of(Step)[-1].masks == []
    desk.settle()
    desk.receive(Masked([masked(1, 5), masked(2, 5)], []))
    assert desk.of(StepMasks)[1:] == [StepMasks(2, [masked(1, 5), masked(2, 5)])]


def test_a_step_does_not_wait_for_rows_that_have_ended() -> None:
    """One finishes, one fails, and of one the grammar allows nothing more."""
    desk = constrained(4)
    desk.receive(Masked([masked(grant, 4) for grant in range(1, 5)], []))
    desk.settle(1, failed=(2,))
    assert len(desk.of(StepMasks)) == 1
    desk.receive(Masked([masked(4, 5)], [3]))
    assert desk.of(StepMasks)[1:] == [StepMasks(2, [masked(4, 5)])]
    assert desk.of(Step)[-1].late == [4] and desk.of(Step)[-1].step == 3


def test_the_last_token_of_a_row_and_those_of_an_aborted_row_have_masks_too() -> None:
    """Both rows are retired while their step is in flight; the step is right only with their masks."""
    desk = constrained(2, max_tokens=2)
    desk.receive(Masked([masked(1, 4), masked(2, 4)], []))
    assert not desk.scheduler.state.rows and desk.of(Step)[-1].late == [1, 2]
    desk.receive(Abort("r2", "abort"))
    desk.settle()
    desk.receive(Masked([masked(1, 5), masked(2, 5)], []))
    assert desk.of(StepMasks)[-1] == StepMasks(2, [masked(1, 5), masked(2, 5)])


def test_a_mask_that_is_there_is_not_sent_twice() -> None:
    desk = constrained(1)
    desk.receive(Masked([masked(1, 4)], []))
    desk.settle()
    desk.receive(Masked([masked(1, 5)], []))
    desk.settle()
    assert [step.late for step in desk.of(Step)] == [[1], [1], [1]]
    assert desk.of(StepMasks) == [StepMasks(1, [masked(1, 4)]), StepMasks(2, [masked(1, 5)])]


def test_a_row_waits_for_masks_with_drafts_only_while_drafts_are_fed() -> None:
    """Drafts that are right with a chance of 0.31 promise 1.31 tokens in 1.1 times the time, which is not enough."""
    for chance, is_fed in ((0.31, False), (0.9, True)):
        desk = constrained(1, max_tokens=60, drafts=8)
        desk.receive(Speeds(decode=1.0, draft=0.1))
        desk.receive(Masked([masked(1, 4)], []))
        desk.settle()
        for position in (5, 6):  # the mask of the step in flight, and one that the row waits for
            own = Proposal(1, position, pack([7]), chance)
            desk.receive(Masked([RowMask(1, position, b"words", [b"ahead"], own)], []))
            desk.settle()
        step = desk.of(Step)[-1]
        assert bool(step.drafts) == is_fed
        desk.settle()
        assert bool(desk.of(Step)[-1].late) != is_fed
