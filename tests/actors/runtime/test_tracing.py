"""Envelopes and their traces, the events that a ring records, and its timings."""

import asyncio
import random
import time
from collections import Counter
from itertools import pairwise
from typing import Any, get_args

import msgspec
import pytest

from baton.actors.forward.device import Work, WorkChunk
from baton.actors.forward.launching import Done
from baton.actors.lease import Ledger
from baton.actors.messages import Abort, Acquire, Closed, Ended, Free, Message, Over, Ran, Retire, Settled, Submit, Want
from baton.actors.requests import Request, Sampling, Stops
from baton.actors.runtime.events import ActEvent, Event, MessageEvent, MoveEvent, RequestEvent, StepEvent, UnitEvent
from baton.actors.runtime.mailboxes import Runtime
from baton.actors.runtime.observing import MeasuringObserver
from baton.actors.runtime.timings import BOUNDS, Histogram, Timings, timed
from baton.actors.runtime.tracing import Traces
from baton.models.hash import HashModel
from tests.actors.ring import Answer, Ring, running

TRACES = ("a" * 32, "b" * 32, "c" * 32)
SHARED = {
    "scheduler": {"Step", "Extend"},
    "results": {"Settled", "Delta"},
    "forward": {"Stepped"},
    "cache": {"Extended"},
}


def request(id: str, trace: str) -> Request:
    return Request(id, b"\0\0\0\0", 1, Sampling(), Stops(1), trace=trace)


def test_a_message_belongs_to_the_trace_of_what_it_names() -> None:
    traces = Traces({7: "b"}.get)  # type: ignore[arg-type]
    assert traces.of(Submit(request("r", "a"))) == "a"
    assert traces.of(Abort("r")) == "a"
    assert traces.of(Acquire(7, b"", 0, "", None)) == "b" == traces.of(Want(7, []))
    assert traces.of(Free([], closes_grant=7)) == "b"
    traces.current = "c"
    assert traces.of(Free([])) == traces.of(Settled(1, [7])) == "c", "it names nobody, or several"
    traces.current = ""
    assert traces.of(Closed(7)) == "b" and traces.of(Retire(7, "finished", 3)) == "", "the grant is forgotten"
    assert traces.of(Over("r")) == "a" and traces.of(Ended("r", "aborted", "")) == "", "the request is forgotten"


def test_every_message_that_names_a_request_or_a_grant_has_a_trace() -> None:
    known = vars(Traces(lambda grant: ""))["_readers"]
    naming = {
        kind
        for kind in get_args(Message)
        if {field.name for field in msgspec.structs.fields(kind)} & {"request", "grant", "closes_grant"}
    }
    assert naming == known.keys()


class Forwarder:
    """An actor that sends two messages for each Abort, at once and from `act`. Neither names a grant or request."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    def receive(self, message: Message) -> None:
        self.runtime.send("cache", "scheduler", Free([]))

    def act(self) -> None:
        self.runtime.send("cache", "scheduler", Free([]))

    def leases(self) -> list[Any]:
        return []


def test_a_message_that_names_nothing_inherits_the_trace_of_the_message_being_received() -> None:
    now = iter(range(100))
    observer = MeasuringObserver(Traces(lambda grant: ""), Timings(), clock=lambda: float(next(now)))
    runtime = Runtime(Ledger(1), observer=observer)
    cache = Forwarder(runtime)
    for address in ("cache", "scheduler"):
        runtime.add(address, cache)
    runtime.send("api", "cache", Submit(request("r", "a")))
    [envelope] = runtime.mailboxes["cache"].envelopes
    assert (envelope.sender, envelope.sequence, envelope.trace, envelope.sent) == ("api", 1, "a", 0.0)
    runtime.deliver("cache")
    cache.act()
    inherited, own = runtime.mailboxes["scheduler"].envelopes
    assert (inherited.trace, own.trace) == ("a", "")
    assert (inherited.sequence, own.sequence) == (2, 3)


def prompts(seed: int, count: int) -> list[list[int]]:
    rng = random.Random(seed)
    stem = [rng.randrange(61) for _ in range(30)]
    return [stem[: rng.randint(1, 30)] + [rng.randrange(61) for _ in range(5)] for _ in range(count)]


def record_ring(restart: bool = False) -> tuple[list[Event], list[Answer], Ring]:
    """Run twelve requests in a small ring, some of which are retracted; return all events, answers and the ring."""
    events: list[Event] = []
    answers: list[Answer] = []

    async def scenario() -> Ring:
        tight: Any = {"slots": 6, "pages": 36, "page_size": 4, "max_running": 4, "step_tokens": 24, "track_interval": 8}
        model: Any = HashModel(vocab_size=61, chunk_size=8, max_position=1024)
        async with running(model, **tight, record=events.append, restarts=1) as ring:
            for number, prompt in enumerate(prompts(3, 12)):
                answers.append(ring.submit(prompt, 20, trace=TRACES[number % 3]))
            if restart:
                await ring.until(lambda: any(answer.tokens for answer in answers))
                ring.relay.unit.results.receive = fail  # type: ignore[method-assign]
            for answer in answers:
                await asyncio.wait_for(answer.done.wait(), 60)
        return ring

    def fail(message: Message) -> None:
        raise RuntimeError("broken")

    ring = asyncio.run(scenario())
    return events, answers, ring


@pytest.fixture(scope="module")
def recorded() -> tuple[list[Event], list[Answer], Ring]:
    return record_ring()


def test_every_message_about_a_request_carries_its_trace(recorded: tuple[list[Event], list[Answer], Ring]) -> None:
    events, answers, _ = recorded
    messages = [event for event in events if isinstance(event, MessageEvent)]
    trace_of = {answer.request.id: answer.request.trace for answer in answers}
    owner = {m.grants[0]: m.requests[0] for m in messages if m.name == "Admit"}
    seen = Counter()
    for message in messages:
        named = {trace_of[id] for id in message.requests} | {trace_of[owner[g]] for g in message.grants if g in owner}
        shared = message.name in SHARED.get(message.sender, ())
        if named and not shared:
            assert {message.trace} == named, message
            seen[message.name] += 1
        elif shared:
            assert message.trace == "", message
    expected = {"Submit", "Acquire", "Granted", "Admit", "Admitted", "Retire", "Retired", "Donate", "Closed", "Over"}
    assert expected <= seen.keys()


def test_a_ring_records_what_it_does(recorded: tuple[list[Event], list[Answer], Ring]) -> None:
    events, answers, ring = recorded
    messages = [event for event in events if isinstance(event, MessageEvent)]
    assert len(messages) == ring.relay.counters()["messages"]
    assert sorted(m.sequence for m in messages) == list(range(1, len(messages) + 1))
    assert all(m.sent <= m.delivered <= m.handled for m in messages)
    assert sum(isinstance(event, MoveEvent) for event in events) == ring.relay.lease_moves().total()
    steps = [event for event in events if isinstance(event, StepEvent)]
    assert [step.step for step in steps] == [m.step for m in messages if m.name == "Ran"]
    assert len(steps) == ring.relay.timings.steps and all(0 < s.rows <= s.tokens for s in steps)
    assert {event.actor for event in events if isinstance(event, ActEvent)} == {*SHARED, "api"}
    lives = [(e.request, e.what) for e in events if isinstance(e, RequestEvent)]
    for answer in answers:
        own = [what for id, what in lives if id == answer.request.id]
        assert (own[0], own[-1]) == ("queued", "ended")
        assert own.count("first_token") == 1 and own.index("admitted") < own.index("first_token")


def test_after_a_restart_there_is_a_new_unit_and_numbers_continue() -> None:
    events, answers, _ = record_ring(restart=True)
    assert sum(isinstance(event, UnitEvent) for event in events) == 2
    sequences = [event.sequence for event in events if isinstance(event, MessageEvent)]
    assert len(sequences) == len(set(sequences))
    [restarted] = [e for e in events if isinstance(e, MessageEvent) and e.name == "Restarted"]
    assert restarted.sender == "supervision"
    ended = Counter(e.request for e in events if isinstance(e, RequestEvent) and e.what == "ended")
    assert ended == {answer.request.id: 1 for answer in answers}


def test_traces_of_closed_grants_and_answered_requests_are_forgotten(
    recorded: tuple[list[Event], list[Answer], Ring],
) -> None:
    _, _, ring = recorded
    assert vars(ring.relay.unit.traces)["_grants"] == {}
    assert vars(ring.relay.unit.traces)["_requests"] == {}


def test_waits_and_work_are_timed(recorded: tuple[list[Event], list[Answer], Ring]) -> None:
    events, _, ring = recorded
    timings = ring.relay.timings
    lasted = max(e.handled for e in events if isinstance(e, MessageEvent))
    for actor in SHARED:
        delivered = [e for e in events if isinstance(e, MessageEvent) and e.to == actor]
        assert sum(timings.waits[actor].counts) == len(delivered)
        waited = sum(e.delivered - e.sent for e in delivered)
        assert timings.waits[actor].total == pytest.approx(waited)
        assert sum(e.handled - e.delivered for e in delivered) <= timings.busy[actor] < lasted


def test_a_histogram_counts_by_upper_bound() -> None:
    histogram = Histogram()
    for value in (0.0, BOUNDS[0], BOUNDS[0] * 1.01, BOUNDS[-1] * 2):
        histogram.observe(value)
    assert (histogram.counts[0], histogram.counts[1], histogram.counts[-1], sum(histogram.counts)) == (2, 1, 1, 4)
    assert len(histogram.counts) == len(BOUNDS) + 1 and histogram.total == pytest.approx(BOUNDS[0] * 2.01 + 2.0)


def test_the_bounds_of_a_histogram_are_close_to_each_other_from_ten_microseconds_to_a_second() -> None:
    assert (BOUNDS[0], BOUNDS[-1]) == (1e-5, 1.0)
    assert all(1.9 < upper / lower < 2.6 for lower, upper in pairwise(BOUNDS))


class Sleeper:
    """A device whose `launch` takes a second of an artificial clock; its other calls take no time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.fails = False
        self.cleared: list[int] = []

    def clear(self, slot: int) -> None:
        self.cleared.append(slot)

    def open_row(self, row: int, *more: Any) -> None:
        pass

    def launch(self, work: Work) -> Done:
        self.now += 1.0
        return (
            Done(Ran(work.step, b"", [], [], error="broken"), 0.0)
            if self.fails
            else Done(Ran(work.step, b"", [], []), 1.0)
        )


def test_overhead_is_the_pause_between_steps_that_have_a_row_in_common() -> None:
    timings, sleeper, events = Timings(), Sleeper(), list[Event]()
    device = timed(sleeper, timings, lambda: sleeper.now, events.append)  # type: ignore[arg-type]
    prompt = request("r", "")
    device.clear(3)
    device.open_row(0, 1, 3, prompt, [])

    def run(work: Work) -> None:
        device.launch(work).collect()

    run(Work(1, [WorkChunk(0, 0, 8, True)], [], [], []))
    sleeper.now += 0.125
    run(Work(2, [], [0], [8], []))
    assert (timings.overhead.total, sum(timings.overhead.counts)) == (0.125, 1)
    sleeper.now += 100
    device.open_row(1, 2, 4, prompt, [])
    run(Work(3, [WorkChunk(1, 0, 4, True)], [], [], []))
    sleeper.now += 100
    device.open_row(1, 3, 4, prompt, [])
    run(Work(4, [WorkChunk(1, 0, 4, True)], [], [], []))
    assert sum(timings.overhead.counts) == 1, "the device had nothing to do before these steps"
    assert (timings.steps, timings.device_busy, sleeper.cleared) == (4, 4.0, [3])
    assert events[0] == StepEvent(1, 0.0, 1.0, 1, 8) and events[1] == StepEvent(2, 1.125, 2.125, 1, 1)


def test_the_seconds_of_a_step_that_failed_are_neither_busy_nor_idle() -> None:
    timings, sleeper, events = Timings(), Sleeper(), list[Event]()
    device = timed(sleeper, timings, lambda: sleeper.now, events.append)  # type: ignore[arg-type]
    for step, fails in ((1, False), (2, True), (3, False)):
        sleeper.fails = fails
        device.launch(Work(step, [], [0], [step], [])).collect()
        sleeper.now += 0.125
    assert (timings.steps, timings.device_busy) == (len(events), 2.0) == (2, 2.0)
    assert (timings.overhead.total, sum(timings.overhead.counts)) == (0.125, 1)


def test_the_clock_of_a_relay_is_the_machines() -> None:
    before = time.monotonic()
    events, _, _ = record_ring()
    [unit] = [event for event in events if isinstance(event, UnitEvent)]
    assert before <= unit.at <= time.monotonic()
