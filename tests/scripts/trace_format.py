"""The rules of Chrome's Trace Event Format, as far as scripts/trace uses it."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

TraceEvent = dict[str, Any]
Track = tuple[int, int]

MEMBERS = {
    "M": {"name", "ph", "pid", "tid", "args"},
    "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"},
    "b": {"name", "cat", "ph", "ts", "pid", "tid", "id", "args"},
    "n": {"name", "cat", "ph", "ts", "pid", "tid", "id", "args"},
    "e": {"name", "cat", "ph", "ts", "pid", "tid", "id", "args"},
    "s": {"name", "cat", "ph", "ts", "pid", "tid", "id"},
    "f": {"name", "cat", "ph", "ts", "pid", "tid", "id", "bp"},
    "i": {"name", "cat", "ph", "ts", "pid", "tid", "s"},
}
METADATA = {"process_name": "name", "thread_name": "name", "thread_sort_index": "sort_index"}
ROUNDING_US = 1e-6


def check(events: Sequence[TraceEvent]) -> None:
    """Assert that events follow all rules."""
    for event in events:
        check_members(event)
    timed = [event for event in events if event["ph"] != "M"]
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    slices = defaultdict(list)
    for event in timed:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    check_names(events, set(slices))
    for track in slices.values():
        check_nesting(track)
    check_flows(timed, slices)
    check_spans(timed)


def check_members(event: TraceEvent) -> None:
    assert set(event) == MEMBERS[event["ph"]], event
    assert isinstance(event["name"], str) and event["name"]
    assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
    if event["ph"] == "M":
        assert METADATA[event["name"]] in event["args"]
    else:
        assert event["ts"] >= 0 and event.get("dur", 0) >= 0, event
    assert event.get("bp", "e") == "e" and event.get("s", "g") in "gpt"


def check_names(events: Sequence[TraceEvent], tracks: set[Track]) -> None:
    """Assert that each track with a slice has exactly one name, and its process too."""
    named = [(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"]
    assert tracks <= set(named) and len(named) == len(set(named))
    assert {pid for pid, _ in tracks} <= {event["pid"] for event in events if event["name"] == "process_name"}


def check_nesting(slices: Sequence[tuple[float, float]]) -> None:
    """Assert that any two slices of a track are disjoint or nested."""
    open_ends: list[float] = []
    for began, ended in sorted(slices, key=lambda each: (each[0], -each[1])):
        while open_ends and open_ends[-1] <= began + ROUNDING_US:
            open_ends.pop()
        assert not open_ends or ended <= open_ends[-1] + ROUNDING_US, (began, ended, open_ends)
        open_ends.append(ended)


def check_flows(timed: Sequence[TraceEvent], slices: dict[Track, list[tuple[float, float]]]) -> None:
    """Assert that each flow has one beginning and one later end of the same name, each within a slice of its track."""
    ends: dict[str, dict[int, TraceEvent]] = {"s": {}, "f": {}}
    for event in timed:
        if event["ph"] in ends:
            assert event["id"] not in ends[event["ph"]], event
            ends[event["ph"]][event["id"]] = event
            track = sorted(slices[event["pid"], event["tid"]])
            index = bisect_right(track, (event["ts"] + ROUNDING_US, float("inf"))) - 1
            assert index >= 0 and event["ts"] <= track[index][1] + ROUNDING_US, event
    assert ends["s"].keys() == ends["f"].keys()
    for id, begin in ends["s"].items():
        end = ends["f"][id]
        assert (begin["name"], begin["cat"]) == (end["name"], end["cat"]) and begin["ts"] <= end["ts"]


def check_spans(timed: Sequence[TraceEvent]) -> None:
    """Assert that the async spans of each id are properly nested and closed."""
    spans: dict[tuple[str, str], list[str]] = defaultdict(list)
    for event in timed:
        if event["ph"] not in ("b", "n", "e"):
            continue
        opened = spans[event["cat"], event["id"]]
        if event["ph"] == "b":
            opened.append(event["name"])
        elif event["ph"] == "e":
            assert opened and opened.pop() == event["name"], event
        else:
            assert opened, event
    assert not any(spans.values())
