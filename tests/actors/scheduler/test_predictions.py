"""For how many tokens the scheduler asks the model's own head, and what it waits for after that."""

from typing import Any

import pytest

from baton.actors.control import Speeds
from baton.actors.grants import Chunk, Proposal, RowMask
from baton.actors.messages import Extend, Settled, Step
from baton.actors.scheduler.plan import PAGE_LEAD
from baton.actors.tokens import pack
from tests.actors.scheduler.desk import Desk

CHEAP = Speeds(decode=1.0, draft=0.02, prediction=0.05)


def predicting(speeds: Speeds, chance: float, rows: int = 1, **options: Any) -> Desk:
    """Return a desk whose rows decode, and whose head's tokens were right this often. No step is in flight."""
    more = {"depth": 1, "drafts": 8, "predictions": 4, "max_running": rows, "step_tokens": 64}
    desk = Desk(**more | options.pop("limits", {}))
    desk.receive(speeds)
    for grant in range(1, rows + 1):
        desk.submit(f"r{grant}", 4, max_tokens=options.pop("max_tokens", 40), **options)
        desk.grant(grant, pages=tuple(range(4)))
        settle(desk, chance)
    desk.sent.clear()
    return desk


def settle(desk: Desk, chance: float, *proposals: Proposal) -> None:
    desk.receive(Settled(0, [], [], [], list(proposals), chance))


def predicted(desk: Desk) -> list[Chunk]:
    return desk.of(Step)[-1].predict


@pytest.mark.parametrize(
    ("speeds", "chance", "number"),
    [
        (CHEAP, 0.9, 4),
        (CHEAP, 0.3, 2),
        (CHEAP, 0.05, 0),
        (Speeds(decode=1.0, draft=0.02, prediction=0.6), 0.9, 2),
        (Speeds(decode=1.0, draft=0.02, prediction=0.9), 0.9, 0),
        (Speeds(decode=1.0, draft=0.02, prediction=0.05, turn=2.0), 0.9, 4),
        (Speeds(decode=1.0, draft=0.02, prediction=0.05, turn=4.0), 0.9, 0),
    ],
)
def test_as_many_tokens_are_predicted_as_promise_the_most_tokens_a_second(
    speeds: Speeds, chance: float, number: int
) -> None:
    desk = predicting(speeds, chance)
    settle(desk, chance)
    assert predicted(desk) == ([Chunk(1, number)] if number else [])


def test_predictions_for_many_rows_cost_their_verification_for_each() -> None:
    one, many = (predicting(Speeds(decode=1.0, draft=0.2, prediction=0.05), 0.6, rows) for rows in (1, 8))
    for desk in (one, many):
        settle(desk, 0.6)
    assert predicted(one) == [Chunk(1, 2)] and not predicted(many)


@pytest.mark.parametrize("speculation", ["off", "ngram"])
def test_nothing_is_predicted_for_requests_that_want_nothing(speculation: str) -> None:
    desk = predicting(CHEAP, 0.9, speculation=speculation)
    settle(desk, 0.9)
    assert not predicted(desk)


def test_nor_where_a_likelier_proposal_is_there() -> None:
    desk = predicting(CHEAP, 0.7)
    row = desk.scheduler.state.rows[1]
    settle(desk, 0.7, Proposal(1, row.position + 1, pack(range(8)), 0.9))
    assert desk.of(Step)[-1].drafts and not predicted(desk)
    settle(desk, 0.7, Proposal(1, row.position + 1, pack(range(8)), 0.6))
    assert predicted(desk)


def test_nor_beyond_the_end_of_the_budget() -> None:
    desk = predicting(CHEAP, 0.9, max_tokens=5)
    row = desk.scheduler.state.rows[1]
    settle(desk, 0.9)
    assert predicted(desk) == [Chunk(1, row.last - row.position - 1)] == [Chunk(1, 1)]
    settle(desk, 0.9)
    assert not predicted(desk)


def test_the_step_that_ends_a_prompt_predicts_too() -> None:
    desk = Desk(depth=1, drafts=8, predictions=4, max_running=1, step_tokens=3)
    desk.receive(CHEAP)
    desk.submit("r1", 4, max_tokens=40)
    desk.grant(1, pages=tuple(range(4)))
    assert not predicted(desk), "the first chunk draws nothing"
    settle(desk, 0.9)
    assert predicted(desk) == [Chunk(1, 4)]


def test_no_step_follows_until_predictions_are_settled() -> None:
    desk = predicting(CHEAP, 0.05, limits={"depth": 2})
    assert desk.scheduler.state.in_flight == 2
    settle(desk, 0.9)
    settle(desk, 0.9)
    assert predicted(desk) and desk.scheduler.state.in_flight == 1


@pytest.mark.parametrize(("speculation", "early"), [("mtp", True), ("ngram", False)])
def test_a_row_asks_early_for_the_page_that_predictions_need(speculation: str, early: bool) -> None:
    desk = predicting(CHEAP, 0.9, speculation=speculation, limits={"page_size": 3})
    row = desk.scheduler.state.rows[1]
    assert row.capacity == 12
    while row.position < 12 - PAGE_LEAD - 1:
        settle(desk, 0.9)
    assert bool(desk.of(Extend)) == early


@pytest.mark.parametrize(
    ("chance", "predicts", "others"),
    [(0.05, False, [254, 255]), (0.9, True, [256, 257, 258])],
)
def test_now_and_then_steps_do_the_opposite(chance: float, predicts: bool, others: list[int]) -> None:
    """So it is known again what predictions cost and how often they are right, and what a step takes without any."""
    desk = predicting(CHEAP, chance)
    desk.scheduler.state.rows[1].budget = 1000
    for _ in range(400):
        settle(desk, chance)
    assert [step.step for step in desk.of(Step) if bool(step.predict) != predicts] == others


def test_rows_with_a_grammar_get_no_unlikely_predictions() -> None:
    for chance, predicts in ((0.29, False), (0.31, True)):
        desk = predicting(CHEAP, chance)
        row = desk.scheduler.state.rows[1]
        row.constrained, row.mask, row.steady_until = True, RowMask(1, row.position + 1, b"words"), 0
        settle(desk, chance)
        row.mask = RowMask(1, row.position + 1, b"words")
        settle(desk, chance)
        assert bool(predicted(desk)) == predicts
