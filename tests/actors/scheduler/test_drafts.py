"""How many drafts each row feeds, and what the scheduler does until it knows which were accepted."""

from typing import Any

import pytest

from baton.actors.control import Speeds
from baton.actors.grants import Advance, GrantPages, Proposal, RowDrafts, RowMask
from baton.actors.messages import Extended, Masked, Retire, Settled, Spare, Step
from baton.actors.scheduler.drafts import FREE_EVERY, PLAIN_EVERY
from baton.actors.scheduler.strategy import Strategy
from baton.actors.tokens import pack
from tests.actors.scheduler.desk import Desk

TOKENS = list(range(50, 60))
FREE = Speeds(decode=1.0, draft=1e-6)


def drafting(rows: int = 1, length: int = 4, **options: Any) -> Desk:
    """Return a desk whose rows have drawn their first token. No step is in flight."""
    speeds, more = options.pop("speeds", FREE), options.pop("more", {})
    desk = Desk(**{"depth": 1, "drafts": 8, "max_running": rows, "step_tokens": 64} | options)
    desk.receive(speeds)
    for grant in range(1, rows + 1):
        desk.submit(f"r{grant}", length, max_tokens=40, **more)
        desk.grant(grant, pages=tuple(range(4)))
        desk.settle()
    desk.sent.clear()
    return desk


def settle(
    desk: Desk, *proposals: Proposal, advanced: tuple[Advance, ...] = (), finished: tuple[int, ...] = ()
) -> None:
    desk.receive(Settled(0, list(finished), [], list(advanced), list(proposals)))


def proposal(position: int, grant: int = 1, tokens: list[int] = TOKENS, chance: float = 0.9) -> Proposal:
    return Proposal(grant, position, pack(tokens), chance)


def fed(desk: Desk) -> dict[int, int]:
    """Return the number of drafts of each row in the newest step."""
    return {drafts.grant: len(drafts.tokens) // 4 for drafts in desk.of(Step)[-1].drafts}


def test_a_row_feeds_what_is_proposed_after_its_last_token() -> None:
    desk = drafting()
    row = desk.scheduler.state.rows[1]
    settle(desk, proposal(row.position + 1))
    assert desk.of(Step)[-1].drafts == [RowDrafts(1, pack(TOKENS[:8]))]


def test_with_a_step_in_flight_the_first_proposal_stands_for_its_token() -> None:
    desk = drafting(depth=2)
    row = desk.scheduler.state.rows[1]
    known = row.position - desk.scheduler.state.in_flight + 1
    settle(desk, proposal(known + 1))
    assert desk.of(Step)[-1].drafts == [RowDrafts(1, pack(TOKENS[1:9]))]
    assert desk.of(Step)[-1].propose == 9


def test_no_step_follows_until_a_step_with_drafts_is_settled() -> None:
    desk = drafting(depth=2)
    row = desk.scheduler.state.rows[1]
    settle(desk, proposal(row.position))
    steps, position = len(desk.of(Step)), row.position
    assert fed(desk) and desk.scheduler.state.in_flight == 2
    settle(desk)
    assert len(desk.of(Step)) == steps
    settle(desk, advanced=(Advance(1, 3),))
    assert row.position == position + 3 + 2, "three were accepted, and two steps without drafts follow"
    assert len(desk.of(Step)) == steps + 2 and not fed(desk)


def test_a_row_is_retired_where_its_accepted_tokens_end() -> None:
    desk = drafting()
    position = desk.scheduler.state.rows[1].position
    settle(desk, proposal(position + 1))
    settle(desk, advanced=(Advance(1, 2),), finished=(1,))
    assert desk.of(Retire) == [Retire(1, "finished", position + 1 + 2)]


def test_drafts_end_before_the_end_of_the_budget() -> None:
    desk = drafting()
    row = desk.scheduler.state.rows[1]
    row.budget = row.position - row.length + 1 + 4
    settle(desk, proposal(row.position + 1))
    assert fed(desk) == {1: row.last - row.position} == {1: 3}


def test_drafts_end_with_the_pages() -> None:
    desk = drafting(page_size=3, length=4)
    row = desk.scheduler.state.rows[1]
    assert row.capacity == 12
    settle(desk, proposal(row.position + 1))
    assert fed(desk) == {1: 12 - row.position}
    desk.receive(Extended([GrantPages(1, [9])], []))
    settle(desk, proposal(row.position + 1), advanced=(Advance(1, 0),))
    assert fed(desk)[1] > 12 - row.position


def test_drafts_end_before_the_next_checkpoint() -> None:
    desk = drafting(strategy=Strategy.JUST_IN_TIME, track_interval=12)
    row = desk.scheduler.state.rows[1]
    assert list(row.targets) == [12]
    settle(desk, proposal(row.position + 1))
    assert fed(desk) == {1: 11 - row.position}, "the step that reaches position 12 feeds its token first"
    desk.receive(Spare(1, [desk.lease()], []))
    settle(desk, proposal(12), advanced=(Advance(1, 11 - row.position),))
    assert [(checkpoint.position, fed(desk)) for checkpoint in desk.of(Step)[-1].checkpoints] == [(12, {1: 8})]


@pytest.mark.parametrize(
    ("speeds", "number"),
    [
        (Speeds(decode=1.0, draft=0.01), 8),
        (Speeds(decode=1.0, draft=0.3), 3),
        (Speeds(decode=1.0, draft=0.3, turn=2.0), 0),
        (Speeds(decode=1.0, draft=0.9), 0),
        (Speeds(decode=1.0), 5),
    ],
)
def test_drafts_are_fed_while_they_bring_more_tokens_a_second(speeds: Speeds, number: int) -> None:
    desk = drafting(speeds=speeds)
    settle(desk, proposal(desk.scheduler.state.rows[1].position + 1, chance=0.8))
    assert sum(fed(desk).values()) == number


def test_likely_drafts_of_some_rows_come_before_unlikely_ones_of_others() -> None:
    desk = drafting(rows=3, speeds=Speeds(decode=1.0, draft=0.1))
    rows = desk.scheduler.state.rows
    settle(desk, *(proposal(rows[grant].position + 1, grant, chance=chance) for grant, chance in ((1, 0.95), (2, 0.3))))
    assert fed(desk)[1] > 4 and fed(desk).get(2, 0) < 2 and 3 not in fed(desk)


def test_a_step_has_no_more_tokens_than_allowed() -> None:
    desk = drafting(rows=2, step_tokens=7)
    rows = desk.scheduler.state.rows
    settle(desk, *(proposal(rows[grant].position + 1, grant) for grant in (1, 2)))
    assert sum(fed(desk).values()) == 5


def test_nothing_is_proposed_where_even_right_drafts_would_not_pay() -> None:
    cheap, dear = (drafting(rows=4, speeds=Speeds(decode=1.0, draft=draft)) for draft in (0.1, 0.3))
    alone = drafting(speeds=Speeds(decode=1.0, draft=0.05, turn=0.9))  # one draft would not pay, eight do
    for desk, most in ((cheap, 8), (dear, 0), (alone, 8)):
        desk.settle()
        assert desk.of(Step)[-1].propose == most


def test_now_and_then_drafts_are_fed_whatever_they_cost() -> None:
    desk = drafting(speeds=Speeds(decode=1.0, draft=3.0), more={})
    row = desk.scheduler.state.rows[1]
    row.budget = 400
    for _ in range(FREE_EVERY + 12):
        proposals = [proposal(row.position + 1)] if desk.of(Step) and desk.of(Step)[-1].propose else []
        settle(desk, *proposals)
    assert [step.step for step in desk.of(Step) if step.drafts] == [FREE_EVERY]


def test_there_are_no_drafts_until_a_plain_step_has_been_measured() -> None:
    desk = drafting(speeds=Speeds())
    settle(desk, proposal(desk.scheduler.state.rows[1].position + 1))
    assert not fed(desk) and desk.of(Step)[-1].propose == 0
    desk.receive(Speeds(decode=1.0))
    settle(desk, proposal(desk.scheduler.state.rows[1].position + 1))
    assert fed(desk)


def test_now_and_then_a_step_is_plain() -> None:
    desk = drafting()
    row = desk.scheduler.state.rows[1]
    row.budget = 3 * PLAIN_EVERY
    for _ in range(PLAIN_EVERY):
        settle(desk, proposal(row.position + 1))
    assert [step.step for step in desk.of(Step) if not step.drafts] == [PLAIN_EVERY // 2 + 1, PLAIN_EVERY // 2 + 2]


def test_a_row_with_a_grammar_feeds_the_drafts_that_came_with_its_mask() -> None:
    desk = drafting()
    row = desk.scheduler.state.rows[1]
    ahead, before = [b"after one", b"after two", b"after three"], Proposal(1, row.position, pack(TOKENS[:1]), 0.9)
    row.constrained, row.steady_until, row.mask = True, 0, RowMask(1, row.position, b"", [b""], before)
    settle(desk)
    desk.sent.clear()
    for number, position in ((2, row.position), (2, row.position + 1)):
        own = Proposal(1, position, pack(TOKENS[:number]), 0.9)
        desk.receive(Masked([RowMask(1, position, b"words", ahead[:number], own)], []))
    [step] = desk.of(Step)
    assert step.drafts == [RowDrafts(1, pack(TOKENS[:2]))]
    assert step.masks == [RowMask(1, row.position, b"words", ahead[:2])], "the mask of another position is not used"
