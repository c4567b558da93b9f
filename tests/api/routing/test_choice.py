"""The choice of an engine, in seconds."""

import pytest

from baton.api.routing.choice import Chosen, Demand, Engines
from baton.api.routing.index import StateIndex

PROMPT = 1000
TOKEN_S, STEP_S = 0.001, 0.02


@pytest.fixture
def index() -> StateIndex:
    return StateIndex()


@pytest.fixture
def engines(index: StateIndex) -> Engines:
    engines = Engines(index)
    for engine in range(4):
        engines.report(engine, 0.0, TOKEN_S, STEP_S, 0)
    return engines


def choose(engines: Engines, *places: tuple[int, int], tokens: int = PROMPT, but: tuple[int, ...] = ()) -> Chosen:
    chosen = engines.choose(Demand(tokens, sorted(places, reverse=True)), but)
    assert chosen is not None
    return chosen


def test_the_engine_with_the_longest_beginning_answers_first(engines: Engines, index: StateIndex) -> None:
    index.add(2, [70])
    index.add(3, [70, 90])
    index.add(1, [30])
    chosen = choose(engines, (300, 30), (700, 70), (900, 90))
    assert (chosen.engine, chosen.cached) == (3, 900)


def test_a_queue_may_take_longer_than_computing_elsewhere(engines: Engines, index: StateIndex) -> None:
    index.add(3, [90])
    engines.report(3, 0.85, TOKEN_S, STEP_S, 4)
    assert choose(engines, (900, 90)).engine == 3  # 0.85 s in the queue and 100 tokens are less than 1000 tokens
    engines.report(3, 0.95, TOKEN_S, STEP_S, 4)
    assert choose(engines, (900, 90)).engine != 3


def test_what_was_just_sent_counts_at_once(engines: Engines) -> None:
    sent = [choose(engines).sent for _ in range(4)]
    assert {each.engine for each in sent} == {0, 1, 2, 3}
    engines.answered(sent[2])  # its first token has come, so only its row is left
    assert choose(engines).engine == sent[2].engine


def test_a_report_counts_what_was_sent_before_it(engines: Engines) -> None:
    sent = choose(engines).sent
    engines.report(sent.engine, 0.0, TOKEN_S, STEP_S, 0)
    engines.answered(sent)  # it was counted by the report, so it must not be subtracted once more
    assert {choose(engines).engine for _ in range(4)} == {0, 1, 2, 3}


def test_of_equal_engines_the_one_with_the_fewest_rows_is_chosen(engines: Engines) -> None:
    for engine, rows in enumerate((3, 1, 2, 4)):
        engines.report(engine, 0.0, TOKEN_S, STEP_S, rows)
    assert choose(engines).engine == 1


def test_a_slower_engine_gets_less(engines: Engines) -> None:
    engines.report(0, 0.0, 10 * TOKEN_S, STEP_S, 0)
    chosen = [choose(engines).engine for _ in range(31)]
    assert 1 <= chosen.count(0) <= 2


def test_engines_leave_and_join(engines: Engines, index: StateIndex) -> None:
    index.add(1, [90])
    engines.remove(1)
    engines.remove(1)
    assert choose(engines, (900, 90)).engine != 1
    assert {choose(engines).engine for _ in range(12)} == {0, 2, 3}
    engines.report(7, 0.0, TOKEN_S, STEP_S, 0)
    assert choose(engines).engine == 7
    assert choose(engines, but=(0, 2, 7)).engine == 3
    assert engines.choose(Demand(PROMPT, ()), (0, 2, 3, 7)) is None
    for engine in (0, 2, 3, 7):
        engines.remove(engine)
    assert engines.choose(Demand(PROMPT, ())) is None
