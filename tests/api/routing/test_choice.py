"""The choice of an engine, in seconds."""

from collections.abc import Iterable

import pytest

from baton.api.routing.choice import Chosen, Demand, Engines
from baton.api.routing.index import StateIndex

PROMPT = 1000
MINUTE = 60.0
TOKEN_S, STEP_S = 0.001, 0.02
SLOTS = 16


@pytest.fixture
def index() -> StateIndex:
    return StateIndex()


class Clock:
    """A clock that stands."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def engines(index: StateIndex, clock: Clock) -> Engines:
    engines = Engines(index, clock)
    for engine in range(4):
        engines.report(engine, 0.0, TOKEN_S, STEP_S, 0, SLOTS)
    return engines


def choose(
    engines: Engines,
    *places: tuple[int, int],
    tokens: int = PROMPT,
    but: Iterable[int] = (),
    home: int | None = None,
    coming: int = 0,
) -> Chosen:
    chosen = engines.choose(Demand(tokens, sorted(places, reverse=True), home, coming), but)
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
    engines.report(3, 0.85, TOKEN_S, STEP_S, 4, SLOTS)
    assert choose(engines, (900, 90)).engine == 3  # 0.85 s in the queue and 100 tokens are less than 1000 tokens
    engines.report(3, 0.95, TOKEN_S, STEP_S, 4, SLOTS)
    assert choose(engines, (900, 90)).engine != 3


def test_what_was_just_sent_counts_at_once(engines: Engines) -> None:
    sent = [choose(engines).sent for _ in range(4)]
    assert {each.engine for each in sent} == {0, 1, 2, 3}
    engines.answered(sent[2])  # its first token has come, so only its row is left
    assert choose(engines).engine == sent[2].engine


def test_a_report_counts_what_was_sent_before_it(engines: Engines) -> None:
    sent = choose(engines).sent
    engines.report(sent.engine, 0.0, TOKEN_S, STEP_S, 0, SLOTS)
    engines.answered(sent)  # it was counted by the report, so it must not be subtracted once more
    assert {choose(engines).engine for _ in range(4)} == {0, 1, 2, 3}


def test_of_equal_engines_the_one_with_the_fewest_rows_is_chosen(engines: Engines) -> None:
    for engine, rows in enumerate((3, 1, 2, 4)):
        engines.report(engine, 0.0, TOKEN_S, STEP_S, rows, SLOTS)
    assert choose(engines).engine == 1


def test_idle_engines_get_equally_many_chats(engines: Engines, clock: Clock) -> None:
    """An engine that is idle again does not get all new chats: its states would push each other out."""
    chosen = list[int]()
    for number in range(40):
        clock.now = 2.0 * number
        one = choose(engines)
        engines.answered(one.sent)
        engines.report(one.engine, 0.0, TOKEN_S, STEP_S, 0, SLOTS)
        chosen.append(one.engine)
    assert [chosen.count(engine) for engine in range(4)] == [10, 10, 10, 10]


def answer(engines: Engines, engine: int, requests: int) -> None:
    """Let an engine answer requests, and report that it is idle."""
    for _ in range(requests):
        engines.answered(choose(engines, but={0, 1, 2, 3} - {engine}).sent)
    engines.report(engine, 0.0, TOKEN_S, STEP_S, 0, SLOTS)


def test_a_chat_whose_states_are_gone_returns_to_its_engine(engines: Engines, clock: Clock) -> None:
    for engine, requests in enumerate((1, 2, 3, 4)):
        answer(engines, engine, requests)
    assert choose(engines, home=2).engine == 2
    answer(engines, 2, 0)
    assert choose(engines).engine == 0  # a new chat would push out more states elsewhere
    clock.now += 10 * MINUTE
    for engine in (0, 1, 3):
        answer(engines, engine, 1)
    assert choose(engines).engine == 2  # its last requests were long ago


def test_an_engine_with_more_slots_gets_more_chats(engines: Engines) -> None:
    engines.report(1, 0.0, TOKEN_S, STEP_S, 0, 3 * SLOTS)
    chosen = list[int]()
    for _ in range(60):
        one = choose(engines)
        engines.answered(one.sent)
        engines.report(one.engine, 0.0, TOKEN_S, STEP_S, 0, SLOTS if one.engine != 1 else 3 * SLOTS)
        chosen.append(one.engine)
    assert 28 <= chosen.count(1) <= 32


def test_a_prompt_that_is_being_computed_is_not_computed_elsewhere(engines: Engines) -> None:
    for engine in range(4):
        answer(engines, engine, 1)
    first = choose(engines)
    again = [choose(engines, home=first.engine, coming=PROMPT) for _ in range(8)]
    assert {each.engine for each in again} == {first.engine}
    assert choose(engines).engine != first.engine


def test_a_slower_engine_gets_less(engines: Engines) -> None:
    engines.report(0, 0.0, 10 * TOKEN_S, STEP_S, 0, SLOTS)
    chosen = [choose(engines).engine for _ in range(31)]
    assert 1 <= chosen.count(0) <= 2


def test_engines_leave_and_join(engines: Engines, index: StateIndex) -> None:
    index.add(1, [90])
    engines.remove(1)
    engines.remove(1)
    assert choose(engines, (900, 90)).engine != 1
    assert {choose(engines).engine for _ in range(12)} == {0, 2, 3}
    engines.report(7, 0.0, TOKEN_S, STEP_S, 0, SLOTS)
    assert choose(engines).engine == 7
    assert choose(engines, but=(0, 2, 7)).engine == 3
    assert engines.choose(Demand(PROMPT, ()), (0, 2, 3, 7)) is None
    for engine in (0, 2, 3, 7):
        engines.remove(engine)
    assert engines.choose(Demand(PROMPT, ())) is None


def test_a_wrong_speed_is_measured_again_on_an_idle_engine(index: StateIndex, clock: Clock) -> None:
    """Its speeds count half as much after each minute without requests, but never as more than the fastest engine's."""
    engines = Engines(index, clock)
    index.add(0, [70])
    place, wrong = (PROMPT - 1, 70), 16

    def report(busy: int) -> None:
        engines.report(0, 0.0, TOKEN_S, STEP_S, busy, SLOTS)
        engines.report(1, 0.0, wrong * TOKEN_S, wrong * STEP_S, 0, SLOTS)

    report(1)
    for _ in range(3):
        assert choose(engines).engine == 0
        clock.now += MINUTE
        report(1)
    clock.now += 30 * MINUTE
    report(0)
    assert choose(engines, place).engine == 0, "an idle engine is not faster than any engine is"
    report(8)
    assert choose(engines).engine == 1
    report(8)
    assert choose(engines).engine == 0, "once it has a request, its own speeds count again"
