"""The scheduler and requests: the messages it sends to other actors at each point of a request's life."""

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

# Requests in the queue


def test_a_full_queue_refuses_all_but_what_was_accepted_before() -> None:
    desk = Desk(max_queue=2, max_running=1)
    for name in ("a", "b", "c"):
        desk.submit(name)
    assert desk.ended == [("api", "c", "queue_full")]
    desk.submit("d", resubmitted=True)
    assert len(desk.scheduler.state.queue) == 3


def test_a_second_request_with_the_same_id_waits_until_the_first_is_over(desk: Desk) -> None:
    desk.submit("a")
    desk.grant(1)
    desk.settle(1)
    again = desk.submit("a", length=3)
    assert not desk.scheduler.state.queue
    desk.receive(Over("a"))
    assert [record.request for record in desk.scheduler.state.queue] == [again]


def test_a_request_that_waits_for_its_id_can_be_aborted(desk: Desk) -> None:
    desk.submit("a")
    desk.grant(1)
    desk.settle(1)
    desk.submit("a", length=3)
    desk.receive(Abort("a", "timeout"))
    assert desk.ended == [("api", "a", "timeout")]
    desk.receive(Over("a"))
    assert not desk.scheduler.state.queue


def test_an_abort_concerns_the_later_of_two_requests_with_the_same_id() -> None:
    """The first of the two has been answered already; only its Over has not arrived yet."""
    desk = Desk()
    desk.submit("a")
    desk.grant(1)
    desk.submit("a", length=3)
    desk.receive(Abort("a"))
    assert desk.ended == [("api", "a", "aborted")] and not desk.of(Retire)
    desk.ledger.close()


@pytest.mark.parametrize("reason", ["aborted", "timeout"])
def test_an_abort_in_the_queue(desk: Desk, reason: Any) -> None:
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


def test_an_abort_of_a_queued_request_without_a_grant(desk: Desk) -> None:
    for name in ("a", "b", "c"):
        desk.submit(name)
    desk.receive(Abort("c"))
    assert desk.ended == [("api", "c", "aborted")] and not desk.of(Cancel)


def test_a_request_that_can_never_fit_is_answered(desk: Desk) -> None:
    desk.submit("a")
    desk.receive(Refused(1, "too_large", "it does not fit"))
    assert [m.message for m in desk.of(Ended)] == ["it does not fit"] and desk.ended == [("api", "a", "too_large")]
    desk.submit("b")
    desk.receive(Abort("b"))
    desk.receive(Refused(2, "cancelled", ""))
    assert not desk.scheduler.state.cancelled and len(desk.ended) == 2


def test_an_urgent_request_replaces_one_that_has_not_been_granted_yet() -> None:
    desk = Desk(max_running=1)
    desk.submit("a")
    desk.submit("urgent", priority=-1)
    assert desk.of(Cancel) == [Cancel(1)] and [m.grant for m in desk.of(Acquire)] == [1, 2]
    desk.receive(Refused(1, "cancelled", "", overtaken=5))
    desk.grant(2)
    desk.settle(2)
    assert [(m.grant, m.priority) for m in desk.of(Acquire)] == [(1, 0), (2, -1), (3, 0)]
    assert desk.of(Acquire)[-1].overtaken == 5, "how often it was counts on"


def test_a_cancelled_request_is_acquired_again_after_the_caches_answer() -> None:
    """Until then it is not known how often the request was overtaken."""
    desk = Desk(max_running=1)
    desk.submit("a")
    desk.submit("urgent", priority=-1)
    desk.receive(Abort("urgent"))
    assert [m.grant for m in desk.of(Acquire)] == [1, 2] and desk.of(Cancel) == [Cancel(1), Cancel(2)]
    desk.receive(Refused(2, "cancelled", ""))
    assert len(desk.of(Acquire)) == 2
    desk.receive(Refused(1, "cancelled", "", overtaken=8))
    assert [(m.grant, m.overtaken) for m in desk.of(Acquire)] == [(1, 0), (2, 0), (3, 8)]


# Acquires sent to the cache


def test_a_match_leaves_a_token_to_compute(desk: Desk) -> None:
    desk.submit("a", length=6, salt="key", session="s", priority=3)
    [acquire] = desk.of(Acquire)
    assert (acquire.limit, acquire.salt, acquire.session, acquire.priority) == (5, "key", "s", 3)


@pytest.mark.parametrize(("begin", "limit"), [(0, 0), (1, 0), (4, 3), (9, 5)])
def test_a_match_leaves_the_tokens_whose_log_probabilities_are_requested(desk: Desk, begin: int, limit: int) -> None:
    """A token's log probability comes from the state before that token, so the match must end before it."""
    desk.submit("a", length=6, prompt_logprobs_from=begin)
    assert desk.of(Acquire)[-1].limit == limit
    request = Request("b", pack(range(6)), 4, Sampling(), Stops(9), prompt_logprobs_from=begin)
    desk.receive(Submit(request))
    assert desk.of(Acquire)[-1].limit == 5, "those of its prompt came with its first output"


def test_a_next_turn_names_the_newest_closing_grant_it_continues() -> None:
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


def test_a_requeued_request_names_its_own_last_grant(desk: Desk) -> None:
    request = desk.submit("a")
    desk.grant(1)
    desk.settle(failed=(1,))
    assert desk.of(Retire) == [Retire(1, "failed", 5)]
    desk.receive(Requeue(request, 3))
    desk.receive(Closed(1))
    assert desk.of(Acquire)[-1].predecessor == 1 and desk.of(Acquire)[-1].grant == 2
    [record] = desk.scheduler.state.queue
    assert record.suspect_until == 3
    desk.receive(Abort("a"))
    assert desk.ended == [("results", "a", "aborted")], "results has its output"
    assert desk.of(Cancel) == [Cancel(2)]


def test_aborting_a_request_twice_ends_no_other(desk: Desk) -> None:
    """The requeued request had a row before, so it stays known until the result-processor sends Over."""
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
def test_a_running_request_that_is_aborted_is_retired(desk: Desk, reason: Any) -> None:
    request = desk.submit("a")
    desk.grant(1)
    desk.receive(Abort("a", reason))
    desk.receive(Abort("a", reason))
    assert desk.of(Retire) == [Retire(1, reason, 5)] and not desk.ended and not desk.scheduler.state.rows
    assert set(desk.scheduler.state.closing) == {1}
    desk.receive(Requeue(request))
    assert desk.ended == [("results", "a", reason)], "it was retracted at the same time"
    desk.receive(Over("a"))
    desk.receive(Abort("a", reason))
    assert len(desk.of(Retire)) == 1
