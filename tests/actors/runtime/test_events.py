"""Which grants, requests and phases of a request's life the event of each message names."""

import pytest

from baton.actors.messages import (
    Acquire,
    Admit,
    Chunk,
    Delta,
    Ended,
    Extend,
    Extended,
    Free,
    GrantPages,
    Message,
    Settled,
    Step,
    Stepped,
    Submit,
)
from baton.actors.requests import Hit, Output, Request, Sampling, Stops
from baton.actors.runtime.events import RequestEvent, message_event, request_events
from baton.actors.runtime.mailboxes import Envelope
from baton.actors.tokens import pack

REQUEST = Request("r", pack([1, 2]), 2, Sampling(), Stops(4), trace="t")
STATE = object()


def output(tokens: list[int], so_far: int, finish: str | None = None) -> Output:
    return Output("r", "", pack(tokens), 2, so_far, finish)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("message", "grants", "requests", "step"),
    [
        (Step(3, [Chunk(1, 4), Chunk(2, 4)], [5], [], []), (1, 2), (), 3),
        (Stepped(3, [1, 2], b"", [], [], []), (1, 2), (), 3),
        (Extend([4, 5]), (4, 5), (), None),
        (Extended([GrantPages(4, [1])], [5]), (4,), (), None),
        (Settled(3, [1], [2]), (1, 2), (), 3),
        (Free([], closes_grant=7), (7,), (), None),
        (Free([]), (), (), None),
        (Acquire(7, b"", 0, "", None), (7,), (), None),
        (Submit(REQUEST), (), ("r",), None),
        (Admit(7, REQUEST, STATE, Hit(), False, None, [], None), (7,), ("r",), None),  # type: ignore[arg-type]
        (Delta([output([1], 1)]), (), ("r",), None),
        (Ended("r", "aborted", ""), (), ("r",), None),
    ],
)
def test_what_an_event_names(
    message: Message, grants: tuple[int, ...], requests: tuple[str, ...], step: int | None
) -> None:
    event = message_event(Envelope(message, "a", 9, "t", 1.0), "b", 2.0, 3.0)
    assert (event.sequence, event.name, event.sender, event.to) == (9, type(message).__name__, "a", "b")
    assert (event.sent, event.delivered, event.handled, event.trace) == (1.0, 2.0, 3.0, "t")
    assert (event.grants, event.requests, event.step) == (grants, requests, step)


def events_of(message: Message, to: str = "api") -> list[RequestEvent]:
    return list(request_events(Envelope(message, "a", 1, "t", 1.0), to, 2.0))


def test_the_life_of_a_request() -> None:
    assert events_of(Submit(REQUEST)) == [RequestEvent(1.0, "r", "queued", "t", 2)]
    assert events_of(Delta([output([], 0), output([5, 6], 2), output([7], 3)])) == [
        RequestEvent(2.0, "r", "first_token", tokens=2)
    ]
    assert events_of(Delta([output([7], 3, "stop")])) == [RequestEvent(2.0, "r", "ended", tokens=3, reason="stop")]
    assert events_of(Ended("r", "queue_full", "")) == [RequestEvent(2.0, "r", "ended", "t", reason="queue_full")]
    assert events_of(Ended("r", "too_large", ""), to="results") == [], "results answers for it"
