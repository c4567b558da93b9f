"""The transcript of a ring: one line for each message, followed by a line that shows where the slots are."""

from baton.actors.runtime.events import ActEvent, Event, MessageEvent, MoveEvent, StepEvent, UnitEvent
from baton.actors.runtime.transcript import transcript


def test_moves_stand_below_the_message_or_the_turn_that_caused_them() -> None:
    events: list[Event] = [
        UnitEvent(0.0, 2),
        MessageEvent(1, "Acquire", "scheduler", "cache", 0.0, 0.1, 0.2, grants=(7,)),
        MoveEvent(0.3, 0, 1, "owned", "cache", "take"),
        MoveEvent(0.3, 0, 1, "transit", "cache → scheduler", "Granted"),
        ActEvent("cache", 0.3, 0.4),
        MoveEvent(0.5, 0, 1, "owned", "scheduler", "arrive"),
        MessageEvent(2, "Granted", "cache", "scheduler", 0.3, 0.5, 0.6, grants=(7,)),
        ActEvent("scheduler", 0.6, 0.7),
        MessageEvent(3, "Step", "scheduler", "forward", 0.7, 0.8, 0.9, requests=("r",), step=4),
        StepEvent(4, 0.8, 0.9, 1, 1),
        MoveEvent(1.0, 0, 1, "cached", "node 3", "cache"),
        MessageEvent(4, "Donate", "results", "cache", 0.9, 1.0, 1.1, grants=(7,)),
        MoveEvent(1.2, 1, 1, "quarantined", "nobody", "its lease was dropped"),
        MessageEvent(5, "Free", "results", "cache", 1.1, 1.2, 1.3),
        MoveEvent(1.4, 0, 1, "free", "pool", "free"),
        MessageEvent(6, "Flush", "api", "cache", 1.3, 1.4, 1.5),
    ]
    assert list(transcript(events)) == [
        "the actors start; 2 slots are free",
        "    1  scheduler → cache      Acquire      grant 7",
        "       cache acts",
        "        slot 0 is held by cache",
        "        slot 0 travels cache → scheduler in Granted",
        "    2  cache → scheduler      Granted      grant 7",
        "        slot 0 is held by scheduler",
        "    3  scheduler → forward    Step         request r, step 4",
        "    4  results → cache        Donate       grant 7",
        "        slot 0 is cached in node 3 of the tree",
        "    5  results → cache        Free",
        "        slot 1 is quarantined: its lease was dropped",
        "    6  api → cache            Flush",
        "        slot 0 is free",
    ]
