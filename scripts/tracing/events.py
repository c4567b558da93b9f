"""Conversion of a trace file's events to Chrome's Trace Event Format, which Perfetto reads."""

from collections.abc import Iterator, Sequence
from typing import Any

from baton.actors.runtime.events import Event, MoveEvent, RequestEvent, UnitEvent
from scripts.tracing.ring import Ring
from scripts.tracing.time import Clock, TraceEvent, event_at

RING, SLOTS = 1, 2


def trace_events(log: Sequence[Event]) -> list[TraceEvent]:
    """Return the trace events of a log: the names of the tracks, then all events in the order of their times."""
    clock = Clock(log)
    ring = Ring(clock, log, RING)
    timed = [*ring.slices(), *ring.flows(), *request_spans(clock, log), *slot_owners(clock, log), *units(clock, log)]
    timed.sort(key=lambda event: event["ts"])
    return [*names(ring, log), *timed]


def names(ring: Ring, log: Sequence[Event]) -> Iterator[TraceEvent]:
    yield name_of("process_name", RING, 0, "ring")
    yield name_of("process_name", SLOTS, 0, "slots")
    for name, track in ring.tracks.items():
        yield from name_track(RING, track, name)
    for slot in range(max((event.slots for event in log if isinstance(event, UnitEvent)), default=0)):
        yield from name_track(SLOTS, slot + 1, f"slot {slot}")


def name_track(pid: int, tid: int, name: str) -> Iterator[TraceEvent]:
    yield name_of("thread_name", pid, tid, name)
    yield {"name": "thread_sort_index", "ph": "M", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


def name_of(kind: str, pid: int, tid: int, name: str) -> TraceEvent:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def units(clock: Clock, log: Sequence[Event]) -> Iterator[TraceEvent]:
    for event in log:
        if isinstance(event, UnitEvent):
            yield event_at(clock(event.at), "i", RING, 0, "the actors are made", "ring", s="g")


def request_spans(clock: Clock, log: Sequence[Event]) -> Iterator[TraceEvent]:
    """Yield each request as one async span that contains its phases: queued, prefill, decode."""
    open_phase: dict[str, str] = {}
    for event in log:
        if not isinstance(event, RequestEvent):
            continue
        at, id, phase = clock(event.at), event.request, open_phase.get(event.request)
        if event.what == "queued" and phase is None:
            args = {"trace": event.trace, "prompt_tokens": event.tokens}
            yield span(at, "b", id, id, args)
            yield span(at, "b", id, "queued", {})
            open_phase[id] = "queued"
        elif phase is not None and (new := next_phase(phase, event.what)) is not None:
            yield span(at, "e", id, phase, {})
            yield span(at, "b", id, new, {})
            open_phase[id] = new
        elif phase is not None and event.what == "ended":
            yield span(at, "e", id, phase, {})
            yield span(at, "e", id, id, {"completion_tokens": event.tokens, "finish_reason": event.reason})
            del open_phase[id]
        elif phase is not None:
            yield span(at, "n", id, f"{event.what} again", {})
    for id, phase in open_phase.items():
        yield span(clock.last, "e", id, phase, {})
        yield span(clock.last, "e", id, id, {"finish_reason": "open at the end of the log"})


def next_phase(phase: str, what: str) -> str | None:
    return {("queued", "admitted"): "prefill", ("prefill", "first_token"): "decode"}.get((phase, what))


def span(at: int, phase: str, id: str, name: str, args: dict[str, Any]) -> TraceEvent:
    return event_at(at, phase, RING, 0, name, "request", id=id, args=args)


def slot_owners(clock: Clock, log: Sequence[Event]) -> Iterator[TraceEvent]:
    """Yield a slice for each interval between two moves of a slot, unless the slot was free."""
    held: dict[int, MoveEvent] = {}
    for event in log:
        match event:
            case UnitEvent():
                yield from (owner(clock, move, clock(event.at)) for move in held.values())
                held = {}
            case MoveEvent():
                if (before := held.pop(event.slot, None)) is not None:
                    yield owner(clock, before, clock(event.at))
                if event.place != "free":
                    held[event.slot] = event
            case _:
                pass
    yield from (owner(clock, move, clock.last) for move in held.values())


def owner(clock: Clock, move: MoveEvent, until: int) -> TraceEvent:
    began = clock(move.at)
    args = {"generation": move.generation, "place": move.place, "how": move.how}
    duration = (until - began) / 1000
    return event_at(began, "X", SLOTS, move.slot + 1, move.holder, move.place, dur=duration, args=args)
