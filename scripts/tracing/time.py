"""The clock of a trace, and the fields that all its events have."""

from collections.abc import Sequence
from typing import Any, TypeAlias

from baton.actors.runtime.events import (
    ActEvent,
    Event,
    HeaderEvent,
    MessageEvent,
    MoveEvent,
    RequestEvent,
    StepEvent,
    UnitEvent,
)

TraceEvent: TypeAlias = dict[str, Any]


class Clock:
    """Converter of a log's times to whole nanoseconds since it began; rounding keeps their order."""

    def __init__(self, log: Sequence[Event]) -> None:
        self._origin = next(event.clock for event in log if isinstance(event, HeaderEvent))
        self.last = max(self(end_of(event)) for event in log)

    def __call__(self, time: float) -> int:
        return round((time - self._origin) * 1e9)


def end_of(event: Event) -> float:
    match event:
        case MessageEvent():
            return event.handled
        case StepEvent() | ActEvent():
            return event.ended
        case MoveEvent() | RequestEvent() | UnitEvent():
            return event.at
        case HeaderEvent():
            return event.clock
        case _:
            return 0.0


def event_at(ns: int, phase: str, pid: int, tid: int, name: str, category: str, **more: Any) -> TraceEvent:
    return {"name": name, "cat": category, "ph": phase, "ts": ns / 1000, "pid": pid, "tid": tid, **more}
