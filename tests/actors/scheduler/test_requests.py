"""What the scheduler does with a request at each point of its life: which message goes where."""

from typing import Any

import pytest

from baton.actors.messages import (
    Abort,
    Acquire,
    Admit,
    Cancel,
    Closed,
    Ended,
    Over,
    Refused,
    Requeue,
    Retire,
    Return,
    Submit,
)
from baton.actors.requests import Request, Sampling, Stops
from baton.actors.tokens import pack
from tests.actors.scheduler.desk import Desk

# In the queue


def test_a_full_queue_refuses_all_but_what_was_accepted_before() -> None:
    desk = Desk(max_queue=2, max_running=1)
    for name in ("a", "b", "c"):
        desk.submit(name)
    assert desk.ended == [("api", "c", "queue_full")]
    desk.submit("d", resubmitted=True)
    assert len(desk.scheduler.state.queue) == 3


def test_one_that_is_asked_for_again_waits_for_the_first_to_be_over(desk: Desk) -> None:
    desk.submit("a")
    desk.grant(1)
    desk.settle(1)
    again = desk.submit("a", length=3)
    assert not desk.scheduler.state.queue
    desk.receive(Over("a"))
    assert [record.request for record in desk.scheduler.state.queue] == [again]


def test_one_that_waits_for_its_id_can_be_given_up(desk: Desk) -> None:
    desk.submit("a")
    desk.grant(1)
    desk.settle(1)
    desk.submit("a", length=3)
    desk.receive(Abort("a", "timeout"))
    assert desk.ended == [("api", "a", "timeout")]
    desk.receive(Over("a"))
    assert not desk.scheduler.state.queue


def test_of_two_with_one_id_the_later_is_given_up() -> None:
    """The first has been answered, and word of it is on its way."""
    desk = Desk()
    desk.submit("a")
    desk.grant(1)
    desk.submit("a", length=3)
    desk.receive(Abort("a"))
    assert desk.ended == [("api", "a", "aborted")] and not desk.of(Retire)
    desk.ledger.close()


@pytest.mark.parametrize("reason", ["aborted", "timeout"])
def test_giving_up_in_the_queue(desk: Desk, reason: Any) -> None:
    desk.submit("a")
    desk.receive(Abort("a", reason))
    assert desk.ended == [("api", "a", reason)] and desk.of(Cancel) == [Cancel(1)]
    assert not desk.scheduler.state.queue and desk.scheduler.state.cancelled.keys() == {1}
    desk.receive(Abort("a", reason))
    assert len(desk.ended) == 1, "it is answered"
    desk.grant(1)
    assert [(to, message.grant) for to, message in desk.sent if isinstance(message, Return)] == [("cache", 1)]
    assert not desk.of(Admit)
    desk.receive(Closed(1))
    assert not desk.scheduler.state.cancelled


def test_giving_up_behind_all_that_have_a_grant(desk: Desk) -> None:
    for name in ("a", "b", "c"):
        desk.submit(name)
    desk.receive(Abort("c"))
    assert desk.ended == [("api", "c", "aborted")] and not desk.of(Cancel)


def test_what_can_never_fit_is_answered(desk: Desk) -> None:
    desk.submit("a")
    desk.receive(Refused(1, "too_large", "it does not fit"))
    assert [m.message for m in desk.of(Ended)] == ["it does not fit"] and desk.ended == [("api", "a", "too_large")]
    desk.submit("b")
    desk.receive(Abort("b"))
    desk.receive(Refused(2, "cancelled", ""))
    assert not desk.scheduler.state.cancelled and len(desk.ended) == 2


def test_an_urgent_one_takes_the_turn_of_one_that_has_no_grant_yet() -> None:
    desk = Desk(max_running=1)
    desk.submit("a")
    desk.submit("urgent", priority=-1)
    assert desk.of(Cancel) == [Cancel(1)] and [m.grant for m in desk.of(Acquire)] == [1, 2]
    desk.receive(Refused(1, "cancelled", "", overtaken=5))
    desk.grant(2)
    desk.settle(2)
    assert [(m.grant, m.priority) for m in desk.of(Acquire)] == [(1, 0), (2, -1), (3, 0)]
    assert desk.of(Acquire)[-1].overtaken == 5, "how often it was counts on"


# Asking the cache


def test_a_match_leaves_a_token_to_compute(desk: Desk) -> None:
    desk.submit("a", length=6, salt="key", session="s", priority=3)
    [acquire] = desk.of(Acquire)
    assert (acquire.limit, acquire.salt, acquire.session, acquire.priority) == (5, "key", "s", 3)


@pytest.mark.parametrize(("begin", "limit"), [(0, 0), (1, 0), (4, 3), (9, 5)])
def test_a_match_leaves_what_log_probabilities_are_wanted_of(desk: Desk, begin: int, limit: int) -> None:
    """The log probability of a token comes from the state before it."""
    desk.submit("a", length=6, prompt_logprobs_from=begin)
    assert desk.of(Acquire)[-1].limit == limit
    request = Request("b", pack(range(6)), 4, Sampling(), Stops(9), prompt_logprobs_from=begin)
    desk.receive(Submit(request))
    assert desk.of(Acquire)[-1].limit == 5, "those of its prompt came with its first output"


def test_a_next_turn_goes_on_from_the_latest_that_is_closing() -> None:
    desk = Desk(max_running=9)
    for grant, (name, tokens) in enumerate((("a", [1]), ("b", [1, 2]), ("c", [1, 2]), ("d", [7])), 1):
        desk.submit(name, tokens=tokens, salt="x" if name == "c" else "")
        desk.grant(grant)
    for grant in (1, 2, 3, 4):
        desk.settle(grant)
    desk.submit("next", tokens=[1, 2, 3])
    assert desk.of(Acquire)[-1].predecessor == 2
    desk.submit("other", tokens=[1, 2, 3], salt="x")
    assert desk.of(Acquire)[-1].predecessor == 3


def test_a_request_that_comes_back_names_its_own_grant(desk: Desk) -> None:
    request = desk.submit("a")
    desk.grant(1)
    desk.settle(failed=(1,))
    assert desk.of(Retire) == [Retire(1, "failed")]
    desk.receive(Requeue(request, 3))
    desk.receive(Closed(1))
    assert desk.of(Acquire)[-1].predecessor == 1 and desk.of(Acquire)[-1].grant == 2
    [record] = desk.scheduler.state.queue
    assert record.suspect_until == 3
    desk.receive(Abort("a"))
    assert desk.ended == [("results", "a", "aborted")], "results has its output"
    assert desk.of(Cancel) == [Cancel(2)]


def test_a_request_that_is_given_up_twice_takes_no_other_with_it(desk: Desk) -> None:
    """It had a row before, so it stays until results says that it is over."""
    request = desk.submit("a")
    desk.grant(1)
    desk.submit("b")
    desk.settle(failed=(1,))
    desk.receive(Requeue(request, 3))
    desk.receive(Closed(1))
    desk.receive(Abort("a"))
    desk.receive(Abort("a", "timeout"))
    assert desk.ended == [("results", "a", "aborted")]
    assert [record.request.id for record in desk.scheduler.state.queue] == ["b"]


# Running


@pytest.mark.parametrize("reason", ["aborted", "timeout"])
def test_a_running_request_that_is_given_up_is_retired(desk: Desk, reason: Any) -> None:
    request = desk.submit("a")
    desk.grant(1)
    desk.receive(Abort("a", reason))
    desk.receive(Abort("a", reason))
    assert desk.of(Retire) == [Retire(1, reason)] and not desk.ended and not desk.scheduler.state.rows
    assert set(desk.scheduler.state.closing) == {1}
    desk.receive(Requeue(request))
    assert desk.ended == [("results", "a", reason)], "it was retracted at the same time"
    desk.receive(Over("a"))
    desk.receive(Abort("a", reason))
    assert len(desk.of(Retire)) == 1
