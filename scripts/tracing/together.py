"""The trace files of several engines in one trace, on one scale of time."""

from collections.abc import Iterator, Sequence

from baton.actors.runtime.events import Event, HeaderEvent
from scripts.tracing.events import trace_events
from scripts.tracing.time import TraceEvent

PROCESSES = 2  # tracks of an engine: its ring and its slots


def events_of_engines(logs: Sequence[tuple[str, Sequence[Event]]]) -> list[TraceEvent]:
    """Return the trace events of engines, each with its name and its log, in the order of their times.

    The first event of all is at 0. A request that an engine computes for another belongs to the trace of the client's
    request. Clocks of different machines are as far apart in the trace as they are.
    """
    begins = [next(event.unix_time for event in log if isinstance(event, HeaderEvent)) for _, log in logs]
    first = min(begins)
    events = [
        event
        for number, ((name, log), begin) in enumerate(zip(logs, begins, strict=True))
        for event in _moved(name, number, (begin - first) * 1e6, log)
    ]
    return sorted(events, key=lambda event: event.get("ts", -1.0))


def _moved(name: str, number: int, later_us: float, log: Sequence[Event]) -> Iterator[TraceEvent]:
    """Yield the events of one engine, on tracks and with ids that no other engine has."""
    for event in trace_events(log):
        event["pid"] += PROCESSES * number
        if "ts" in event:
            event["ts"] += later_us
        if "id" in event:
            event["id"] = f"{number}.{event['id']}"
        if event["name"] == "process_name":
            event["args"] = {"name": f"{event['args']['name']} of {name}"}
        yield event
