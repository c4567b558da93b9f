"""Reads a trace file of the server, and rebuilds from it who held which slot."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from actors.runtime.events import DroppedEvent, Event, HeaderEvent, MoveEvent, UnitEvent


class Holding(Struct, frozen=True):
    """A line of GET /debug/slots, as far as moves tell."""

    slot: int
    place: str
    holder: str
    generation: int


def read_log(path: Path) -> list[Event]:
    """All events. A last line that is cut off is left out: the server was killed while it wrote it. ValueError."""
    *lines, _ = path.read_bytes().split(b"\n")
    decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)
    events: list[Event] = []
    for number, line in enumerate(lines, 1):
        try:
            events.append(decoder.decode(line))
        except msgspec.MsgspecError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    if not events or not isinstance(events[0], HeaderEvent):
        raise ValueError(f"{path} is not a trace file")
    return events


def dropped(log: Sequence[Event]) -> int:
    return sum(event.count for event in log if isinstance(event, DroppedEvent))


def rebuild_ledger(log: Sequence[Event]) -> list[Holding]:
    """The ledger at the end of the log."""
    holdings: list[Holding] = []
    for event in log:
        match event:
            case UnitEvent():
                holdings = [Holding(slot, "free", "pool", 0) for slot in range(event.slots)]
            case MoveEvent():
                holdings[event.slot] = Holding(event.slot, event.place, event.holder, event.generation)
            case _:
                pass
    return holdings
