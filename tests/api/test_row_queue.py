"""The estimate of the time until a further request gets a row."""

import pytest

from baton.api.events.rows import RowQueue


def look_for(queue: RowQueue, seconds: float, rows: int, waiting: int, ended: int = 0, at: float = 0.0) -> int:
    """Look ten times a second while so many rows run, each for two seconds. Return how many have ended."""
    for tick in range(round(10 * seconds)):
        ended += rows // 2 if tick % 10 == 0 else 0
        queue.look(at + tick / 10, rows, waiting, ended)
    return ended


def test_a_further_request_waits_for_those_before_it() -> None:
    queue = RowQueue()
    ended = look_for(queue, 60, rows=8, waiting=0)
    assert queue.seconds == 0
    look_for(queue, 60, rows=8, waiting=12, ended=ended, at=60)
    assert queue.seconds == pytest.approx(12 * 2 / 8, rel=0.25)


def test_an_idle_time_does_not_count() -> None:
    queue = RowQueue()
    ended = look_for(queue, 60, rows=8, waiting=0)
    look_for(queue, 600, rows=0, waiting=0, ended=ended, at=60)
    look_for(queue, 0.3, rows=8, waiting=4, ended=ended, at=660)
    assert queue.seconds == pytest.approx(4 * 2 / 8, rel=0.25)


def test_who_has_just_come_does_not_wait_yet() -> None:
    queue = RowQueue()
    ended = look_for(queue, 60, rows=8, waiting=0)
    queue.look(60.0, 8, 3, ended)
    assert queue.seconds == 0
    queue.look(60.1, 8, 2, ended)
    assert queue.seconds == pytest.approx(2 * 2 / 8, rel=0.25)


def test_a_restart_of_the_actors_and_no_knowledge() -> None:
    queue = RowQueue()
    look_for(queue, 5, rows=8, waiting=9, ended=-99)
    queue.look(5.0, 0, 9, 0)
    assert queue.seconds == 0
    unknown = RowQueue()
    for at in range(3):
        unknown.look(float(at), 4, 4, 0)
    assert unknown.seconds == 0
